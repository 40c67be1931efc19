"""`cosmos-launch --config` with an evaluation, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.status import exit_code, find_status, lines
from launcher.job.remote import Target
from launcher.plan.rundir import RunDir
from tests.support.waiting import PATIENCE

ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 2?", "responses": ["#### 4", "#### 5"], "answer": "4", "data_source": "gsm8k"},
    {"prompt": "3 * 3?", "responses": [r"\boxed{9}"], "answer": "9", "data_source": "math_dapo"},
]


def launch(
    tmp_path: Path, *options: str, rows: list[dict[str, Any]] = ROWS
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.toml").write_text(
        '[evaluation]\ndataset = { name = "answers.jsonl" }\nreference_column_name = "answer"\n'
    )
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli", "--config", "eval.toml", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_scores_are_told_and_written(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "outputs").iterdir()
    found = json.loads((run / "evaluation.json").read_text())
    assert (found["score"], found["best"], found["errors"]) == (0.75, 1.0, 0)
    assert found["sources"]["gsm8k"]["score"] == 0.5
    assert "gsm8k" in done.stdout
    assert "0.7500" in done.stdout
    assert len((run / "scores.jsonl").read_text().splitlines()) == 2
    told = find_status(Target(RunDir(run)))
    assert (told["state"], exit_code(told), lines(told)[1]) == ("finished", 0, "  outcome: finished")


def test_a_faulty_row_ends_it_with_its_name(tmp_path: Path) -> None:
    done = launch(tmp_path, rows=[*ROWS, {**ROWS[0], "data_source": "nobody/knows"}])
    assert done.returncode == 2
    assert "line 3" in done.stdout or "row 3" in done.stdout
    assert "nobody/knows" in done.stdout


@pytest.mark.parametrize(("option", "code"), [("--dry-run", 0), ("--resume", 2)])
def test_nothing_is_started(tmp_path: Path, option: str, code: int) -> None:
    done = launch(tmp_path, option)
    assert done.returncode == code
    assert not (tmp_path / "outputs").exists()
    assert ("rollout_worker.evaluate" in done.stdout) == (code == 0)
