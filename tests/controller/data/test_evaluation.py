"""Reading the answers that an evaluation scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.data.evaluation import main
from schema.config import Config
from tests.controller.data.conftest import write

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "responses": ["#### 4", "five"],
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
}


def prepare(tmp_path: Path, rows: list[dict[str, Any]], **section: Any) -> int:
    file = write(tmp_path / "answers.parquet", rows)
    data = {"evaluation": {"dataset": {"name": str(file)}, **section}}
    (tmp_path / "config.json").write_text(Config.model_validate(data).model_dump_json())
    return main(["--run-dir", str(tmp_path)])


def test_rows_become_lines(tmp_path: Path) -> None:
    assert prepare(tmp_path, [ROW, ROW], reference_column_name="reward_model.ground_truth") == 0
    lines = (tmp_path / "data" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1]) == {**ROW, "key": "evaluation/2", "answer": "4"}


def test_one_text_is_one_answer(tmp_path: Path) -> None:
    row = {**ROW, "responses": "four"}
    assert prepare(tmp_path, [row], reward_function="format") == 0
    line = json.loads((tmp_path / "data" / "evaluation.jsonl").read_text(encoding="utf-8"))
    assert line["responses"] == ["four"]
    cell = {**ROW, "responses": '["four", "[1, 2]"]'}  # as CSV has a list
    assert prepare(tmp_path, [cell, {**ROW, "responses": "[1, 2]"}], reward_function="format") == 0
    lines = (tmp_path / "data" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["responses"] for line in lines] == [["four", "[1, 2]"], ["[1, 2]"]]


@pytest.mark.parametrize(
    ("row", "section", "complaint"),
    [
        ({**ROW, "data_source": "nobody/knows"}, {}, "row 1: no built-in reward function is known"),
        ({**ROW, "responses": []}, {}, "row 1: `responses` must be a text or a list of texts"),
        (ROW, {"responses_column_name": "answers"}, "has no such column"),
        (ROW, {"reference_column_name": "reward_model.truth"}, "has no `reward_model.truth`"),
        ({**ROW, "prompt": None}, {}, "`prompt` is empty"),
    ],
)
def test_a_faulty_row_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: Any, section: Any, complaint: str
) -> None:
    assert prepare(tmp_path, [row], **section) == 2
    assert complaint in caplog.text
    assert not (tmp_path / "data" / "evaluation.jsonl").exists()
