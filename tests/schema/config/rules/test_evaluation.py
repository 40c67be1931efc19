"""A configuration with `[evaluation]`: what it needs, and what of a training job it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.config import check_config, check_warnings
from tests.schema.config_samples import changed, refused

ROW = {"prompt": "2 + 2?", "responses": ["#### 4"], "answer": "4", "data_source": "gsm8k"}


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    return {"evaluation": {"dataset": {"name": str(file)}, "reference_column_name": "answer"}}


def test_nothing_of_a_training_job_is_needed(base: dict[str, Any]) -> None:
    config = check_config(base)
    assert config.is_evaluation
    assert not check_warnings(config)
    assert check_config(config.to_dict()).is_evaluation


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("evaluation__dataset__name", "nowhere.parquet", "nowhere.parquet does not exist"),
        ("evaluation__reference_column_name", "truth", "does not have the column `truth`"),
        ("evaluation__responses_column_name", "answers", "does not have the column `answers`"),
        ("evaluation__data_source_column_name", "origin", "does not have the column `origin`"),
        ("evaluation__reward_function", "gsm9k", "unknown reward function `gsm9k`"),
        ("evaluation__reward_function", {}, "no reward function is named"),
        ("evaluation__reward_function", {"gsm8k": 0.0}, "all weights are 0"),
        ("evaluation__dataset__test_size", 3, "has no effect: all answers"),
        ("evaluation__dataset__max_prompt_length", 3, "has no effect: all answers"),
        ("evaluation__dataset__image_column_name", "pictures", "has no effect: all answers"),
    ],
)
def test_mistakes(base: dict[str, Any], key: str, value: Any, complaint: str) -> None:
    (found,) = refused(check_config, changed(base, **{key: value}))
    assert complaint in found.message
    assert found.key.replace(".", "__") == key


def test_one_job_does_one_thing(base: dict[str, Any]) -> None:
    both = changed(base, train__train_policy__dataset__name="synthetic:addition")
    (found,) = refused(check_config, both)
    assert "train.train_policy.dataset is named too" in found.message
