"""`cosmos-launch --config` with an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.status import exit_code, find_status, lines
from launcher.job.remote import RemoteJob
from launcher.plan.rundir import RunDir
from tests.launcher.cli import Answer, cosmos

ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 2?", "responses": ["#### 4", "#### 5"], "answer": "4", "data_source": "gsm8k"},
    {"prompt": "3 * 3?", "responses": [r"\boxed{9}"], "answer": "9", "data_source": "math_dapo"},
]


def launch(tmp_path: Path, *options: str, rows: list[dict[str, Any]] = ROWS) -> Answer:
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.toml").write_text(
        '[evaluation]\ndataset = { name = "answers.jsonl" }\nreference_column_name = "answer"\n'
    )
    return cosmos("--config", "eval.toml", *options, cwd=tmp_path)


def test_scores_are_shown_and_written(tmp_path: Path) -> None:
    launch(tmp_path).says(0, "gsm8k", "0.7500", "data: evaluation: 2 rows of ", ", 2 kept")
    (run,) = (tmp_path / "outputs").iterdir()
    found = json.loads((run / "evaluation.json").read_text())
    assert (found["score"], found["best"], found["errors"]) == (0.75, 1.0, 0)
    assert found["sources"]["gsm8k"]["score"] == 0.5
    assert len((run / "scores.jsonl").read_text().splitlines()) == 2
    shown = find_status(RemoteJob(RunDir(run)))
    assert (shown["state"], exit_code(shown), lines(shown)[1]) == ("finished", 0, "  outcome: finished")


def test_a_faulty_row_ends_it_with_its_name(tmp_path: Path) -> None:
    done = launch(tmp_path, rows=[*ROWS, {**ROWS[0], "data_source": "nobody/knows"}])
    done.says(2, "nobody/knows")
    assert "line 3" in done.stdout or "row 3" in done.stdout


@pytest.mark.parametrize(("option", "code"), [("--dry-run", 0), ("--resume", 2)])
def test_nothing_is_started(tmp_path: Path, option: str, code: int) -> None:
    done = launch(tmp_path, option)
    assert done.returncode == code
    assert not (tmp_path / "outputs").exists()
    assert ("rollout_worker.evaluate" in done.stdout) == (code == 0)
