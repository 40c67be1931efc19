"""Scoring answers from a file with real reward processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.evaluate import main
from schema.config import Config

REWARDS = """
def length(completion, row):
    return len(completion) / 10

def picky(completion, row):
    if "bad" in completion:
        raise ValueError("bad answer")
    return 1.0
"""


def write(run_dir: Path, rows: list[dict[str, Any]], reward: Any, **reward_section: Any) -> None:
    data = {"evaluation": {"dataset": {"name": "x.jsonl"}, "reward_function": reward}, "reward": reward_section}
    (run_dir / "data").mkdir()
    (run_dir / "config.json").write_text(Config.model_validate(data).model_dump_json())
    lines = (json.dumps({"key": f"evaluation/{i}", **row}) for i, row in enumerate(rows, 1))
    (run_dir / "data" / "evaluation.jsonl").write_text("\n".join(lines) + "\n")


def read(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "evaluation.json").read_text())
    return found


def test_means_by_source(tmp_path: Path) -> None:
    """By hand: gsm8k scores 1, 0 (mean 0.5, best 1) and 0, 0; math scores 1."""
    rows = [
        {"prompt": "p", "answer": "#### 4", "data_source": "gsm8k", "responses": ["#### 4", "#### 5"]},
        {"prompt": "p", "answer": "7", "data_source": "gsm8k", "responses": ["7", "#### 8"]},
        {"prompt": "p", "answer": "7", "data_source": "math_dapo", "responses": [r"\boxed{7}"]},
    ]
    write(tmp_path, rows[:2], "gsm8k")
    assert main(["--run-dir", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert (found["prompts"], found["responses"], found["errors"]) == (2, 4, 0)
    assert (found["score"], found["best"]) == (0.25, 0.5)
    assert found["rewards"] == {"gsm8k": 0.25}
    assert found["sources"]["gsm8k"]["score"] == 0.25
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [[1.0, 0.0], [0.0, 0.0]]
    assert [len(line["seconds"]) for line in lines] == [2, 2]


def test_weights_and_many_rows(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    file = str(tmp_path / "rewards.py")
    rows = [{"prompt": "p", "responses": ["x" * (i % 10)] * 3} for i in range(300)]
    write(tmp_path, rows, {f"{file}:length": 2.0, f"{file}:picky": 1.0}, num_workers=2)
    assert main(["--run-dir", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert found["responses"] == 900
    assert found["score"] == pytest.approx(2 * 0.45 + 1)
    assert found["sources"] == {}


def test_a_failing_reward_is_an_error_and_no_zero(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": "p", "responses": ["good", "bad"]}, {"prompt": "p", "responses": ["bad"]}]
    write(tmp_path, rows, f"{tmp_path}/rewards.py:picky")
    assert main(["--run-dir", str(tmp_path)]) == 1
    found = read(tmp_path)
    assert (found["responses"], found["errors"], found["score"]) == (3, 2, 1.0)
    assert "ValueError: bad answer" in found["error_examples"][0]
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["scores"] for line in lines] == [[1.0, None], [None]]


def test_a_function_that_cannot_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [{"prompt": "p", "responses": ["x"]}], f"{tmp_path}/nowhere.py:f")
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "nowhere.py" in caplog.text
    assert not (tmp_path / "evaluation.json").exists()
