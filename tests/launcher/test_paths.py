"""Configurations with absolute paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.paths import resolved
from schema.config import Config, check_config
from schema.config.sections.teacher import TeacherConfig
from tests.launcher.samples import config


def test_relative_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    job = config(
        train={
            "output_dir": "out/../runs",
            "resume": "ckpt/7",
            "train_policy": {
                "dataset": {"name": "train.jsonl"},
                "reward_function": {"boxed_math": 1.0, "my/reward.py:score": 0.5},
                "filter_reward_metric": ["my/reward.py:score"],
                "variant": "my/loss.py:loss",
            },
        },
        policy={"model_name_or_path": "model"},
        reference={"model_name_or_path": "./model"},
        critic={"tokenizer_name_or_path": "./model"},
        validation={"dataset": {"name": "owner/name"}, "reward_function": "my/reward.py:score"},
        weight_sync={"store": "shared"},
    )
    teachers = [TeacherConfig(name="one", model="./model"), TeacherConfig(name="far", url="http://a:1")]
    data = resolved(job.model_copy(update={"teacher": teachers}))
    policy = data["train"]["train_policy"]
    assert data["train"]["output_dir"] == f"{tmp_path}/runs"
    assert data["train"]["resume"] == f"{tmp_path}/ckpt/7"
    assert data["policy"]["model_name_or_path"] == f"{tmp_path}/model"
    assert data["reference"]["model_name_or_path"] == f"{tmp_path}/model"
    assert data["critic"]["tokenizer_name_or_path"] == f"{tmp_path}/model"
    assert [teacher["model"] for teacher in data["teacher"]] == [f"{tmp_path}/model", None]
    assert policy["variant"] == f"{tmp_path}/my/loss.py:loss"
    assert policy["dataset"]["name"] == f"{tmp_path}/train.jsonl"
    assert policy["reward_function"] == {"boxed_math": 1.0, f"{tmp_path}/my/reward.py:score": 0.5}
    assert policy["filter_reward_metric"] == [f"{tmp_path}/my/reward.py:score"]
    assert data["validation"]["dataset"]["name"] == "owner/name"
    assert data["validation"]["reward_function"] == f"{tmp_path}/my/reward.py:score"
    assert data["weight_sync"]["store"] == f"{tmp_path}/shared"


def test_what_is_no_path_stays():
    data = resolved(config(policy={"model_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert data["policy"]["model_name_or_path"] == "Qwen/Qwen3-0.6B"
    assert data["train"]["train_policy"]["dataset"]["name"] == "synthetic:addition"
    assert data["weight_sync"]["store"] == ""
    assert data["train"]["resume"] is False
    bucket = "s3://bucket/weights"
    assert resolved(config(weight_sync={"store": bucket}))["weight_sync"]["store"] == bucket


def test_the_result_is_a_sound_configuration_and_stable():
    job = config(train={"train_policy": {"reward_function": "boxed_math"}})
    once = resolved(job)
    assert resolved(Config.model_validate(once)) == once
    assert check_config(once).train.output_dir == os.path.abspath("outputs")


def test_supervised_training_has_fewer_paths():
    data = resolved(config(train={"train_policy": {"type": "sft"}, "output_dir": "~/runs"}))
    assert data["train"]["output_dir"] == os.path.expanduser("~/runs")


def test_files_and_the_tokenizer_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    data = resolved(
        config(
            train={"train_policy": {"dataset": {"name": "", "files": ["a.jsonl", "~/b.jsonl"]}}},
            policy={"tokenizer_name_or_path": "words"},
            validation={"dataset": {"files": ["sub/../c.parquet"]}},
        )
    )
    dataset = data["train"]["train_policy"]["dataset"]
    assert dataset["files"] == [f"{tmp_path}/a.jsonl", os.path.expanduser("~/b.jsonl")]
    assert (dataset["name"], data["validation"]["dataset"]["files"]) == ("", [f"{tmp_path}/c.parquet"])
    assert data["policy"]["tokenizer_name_or_path"] == f"{tmp_path}/words"
    hub = resolved(config(policy={"tokenizer_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert hub["policy"]["tokenizer_name_or_path"] == "Qwen/Qwen3-0.6B"


def test_parts_of_a_dataset_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    parts = [{"files": ["a.jsonl", "s3://b/c.csv"], "share": 0.5}, {"custom_class": "mine.py:Rows", "share": 0.5}]
    job = config(train={"train_policy": {"dataset": {"name": "", "part": parts}}})
    first, second = resolved(job)["train"]["train_policy"]["dataset"]["part"]
    assert first["files"] == [f"{tmp_path}/a.jsonl", "s3://b/c.csv"]
    assert second["custom_class"] == f"{tmp_path}/mine.py:Rows"
    assert (job.data_schemes, job.shares) == ({"s3"}, {"a.jsonl": 0.5, "mine.py:Rows": 0.5})
