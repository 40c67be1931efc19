"""What libraries are told of a run; the library here notes what it gets."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.trackers.follow import validation_metrics
from launcher.trackers.sinks import SINKS, Run, mlflow_name
from schema.scores.summary import ScoredPrompt, summarise
from schema.wire.messages import ValidationRecord


def test_trackio_keeps_runs_of_one_name_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: list[str] = []

    def init(*, name: str, **_: Any) -> None:
        names.append(name)

    library = ModuleType("trackio")
    monkeypatch.setattr(library, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "trackio", library)
    for run_id, segment in (("a-1", 0), ("a-1", 0), ("a-2", 0), ("a-2", 1)):
        SINKS["trackio"](Run(tmp_path, "project", "try", run_id, segment, fresh=False, config={}))
    assert names[0] == names[1], "a resumed run goes on"
    assert len(set(names)) == 3


def test_every_name_of_a_validation_is_one_that_mlflow_takes() -> None:
    whole = summarise([ScoredPrompt("C++, a@b", [1.0, 0.0], ["1", "2"])], 1.0)
    scores = {"sources": whole.sources, "scores": whole.whole}
    record = ValidationRecord.model_construct(
        loss=None,
        accuracy=None,
        rewards_mean={"f": 1.0},
        score_mean=0.5,
        response_tokens_mean=1.0,
        errors=0,
        **scores,
    )
    names = validation_metrics(record)
    assert "validation/mean@2" in names
    taken = [mlflow_name(name) for name in names]
    assert len(set(taken)) == len(names)
    assert "validation/mean_at_2" in taken
    assert all(re.fullmatch(r"[/\w.\- ]*", name, re.ASCII) for name in taken), "by its own check of names"
