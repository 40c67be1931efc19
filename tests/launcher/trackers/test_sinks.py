"""What libraries are told of a run; the library here notes what it gets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.trackers.sinks import SINKS, Run


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
