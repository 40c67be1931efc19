"""`cosmos-launch samples`: what people read of a run directory, and that nothing of it reaches a terminal raw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.wire import sample_file
from tests.launcher.cli import cosmos
from tests.schema.wire.test_sample_file import record

ROOM = 10**6


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with samples of two steps, one of them failed, and of a validation."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    rewards: dict[str, Any] = {"rewards": {"right": 1.0}, "weights": {"right": 0.5}}
    known = [
        record(0, score=0.5, advantage=1.25, reference="42", **rewards),
        record(1, score=-1.0, answer="evil\x1b[31m\x07\n<b>two</b>", dropped="zero_variance"),
        record(1, 1, None, error="ValueError: no\nTraceback\n  File x"),
        record(5, score=9.0, kind="validation", prompt="x" * 5000),
    ]
    sample_file.Writer(sample_file.folder_of(run), ROOM).append(known)
    return run


def test_samples_are_shown_with_what_was_paid(run_dir: Path) -> None:
    paid = "right 1 × 0.5: score 0.5, advantage 1.25"
    best = cosmos("samples", run_dir, "--best", "-n", "1")
    best.says(0, "step 0", "e0-p0/0", "answer 0", "reference 42", paid)
    newest = cosmos("samples", run_dir)
    newest.says(0, "dropped: zero_variance", "<b>two</b>")
    assert not {"\x1b", "\x07"} & set(newest.stdout)
    cosmos("samples", run_dir, "--errors").says(0, "no score", "    Traceback")


def test_long_texts_are_cut_unless_asked_for(run_dir: Path) -> None:
    cosmos("samples", run_dir, "--validation").says(0, "3800 characters, shown by --full")
    assert len(cosmos("samples", run_dir, "--validation", "--full").stdout) > 5000


def test_for_programs_and_with_nothing_to_show(run_dir: Path) -> None:
    rows = json.loads(cosmos("samples", run_dir, "--worst", "--json").stdout)
    assert [row["score"] for row in rows] == [-1.0, 0.5]
    cosmos("samples", run_dir, "--step", "99").says(1, "no such sample", "steps 0, 1")
    cosmos("samples", run_dir, "--best", "--worst").complains(2, "exclude each other")
