"""`[weight_sync]`: where versions lie, who reaches them, and what a cache that is kept rules out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config import Config
from schema.config.rules.weights import (
    WEIGHT_RULES,
    a_kept_cache_has_engine_probabilities,
    host_cache_is_absolute,
    store_is_a_place,
    store_is_reached_from_all_hosts,
)
from tests.schema.config_samples import GRPO
from tests.schema.remedies import Case, check_case, written

P, STORE, CACHE = "train.train_policy", "weight_sync.store", "weight_sync.host_cache"
KEEP = {"weight_sync.update_mode": "keep_kv"}
HOSTS = {"placement.nodes": 2}

CASES = [
    Case(store_is_a_place, {STORE: "gs://bucket/x"}, STORE, ("gs://bucket/x",)),
    Case(store_is_a_place, {STORE: "s3://"}, STORE, ("bucket",)),
    Case(store_is_a_place, {STORE: "s3://My_Bucket/x"}, STORE, ("My_Bucket",)),
    Case(store_is_a_place, {STORE: "s3://bucket/a//b"}, STORE, ("a//b",)),
    Case(store_is_a_place, {STORE: "s3://bucket/../b"}, STORE, ("../b",)),
    Case(store_is_a_place, {STORE: "s3://key:secret@bucket/b"}, STORE, ("AWS_SECRET_ACCESS_KEY", "'@'")),
    Case(store_is_a_place, {STORE: "s3:/bucket/x"}, STORE, ("s3:/bucket/x",)),
    Case(store_is_a_place, {STORE: "file/in/it"}, STORE, ("file",)),
    Case(store_is_a_place, {STORE: "~/weights"}, STORE, ("~/weights",)),
    Case(store_is_a_place, {STORE: "file"}, STORE, ("file",)),
    Case(
        store_is_reached_from_all_hosts,
        HOSTS | {STORE: "/dev/shm/weights"},
        STORE,
        ("/dev/shm/weights", "placement.nodes = 2"),
    ),
    Case(store_is_reached_from_all_hosts, HOSTS | {"train.output_dir": "/tmp/runs"}, STORE, ("/tmp/runs",)),
    Case(host_cache_is_absolute, {CACHE: "weights"}, CACHE, ("weights",)),
    Case(host_cache_is_absolute, {CACHE: "~/weights"}, CACHE, ("~/weights",)),
    Case(host_cache_is_absolute, {CACHE: "s3://bucket/x"}, CACHE, ("s3://bucket/x",)),
    Case(
        a_kept_cache_has_engine_probabilities,
        KEEP | {f"{P}.use_decoupled_loss": True},
        "weight_sync.update_mode",
        ("keep_kv", f"{P}.use_decoupled_loss = true"),
    ),
    Case(
        a_kept_cache_has_engine_probabilities,
        KEEP | {f"{P}.rollout_correction.weights": "token"},
        "weight_sync.update_mode",
        ("keep_kv", f'{P}.rollout_correction.weights = "token"'),
    ),
    Case(
        a_kept_cache_has_engine_probabilities,
        KEEP | {f"{P}.rollout_correction.reject": "token", f"{P}.rollout_correction.reject_above": 2.0},
        "weight_sync.update_mode",
        ("keep_kv", f'{P}.rollout_correction.reject = "token"'),
    ),
]

SOUND: list[dict[str, Any]] = [
    {STORE: "elsewhere"},
    {STORE: "s3://bucket"},
    {STORE: "s3://my-bucket/team/weights/"},
    HOSTS | {STORE: "s3://bucket/x"},
    HOSTS | {STORE: "/shared/weights"},
    HOSTS | {STORE: "/tmpfs-that-is-shared/weights"},
    {STORE: "/dev/shm/weights"},
    {CACHE: "/dev/shm/weights"},
    KEEP,
    {f"{P}.use_decoupled_loss": True},
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_named_with_a_remedy_that_works(case: Case) -> None:
    check_case(case, GRPO)


def test_every_rule_is_tried() -> None:
    assert {case.rule for case in CASES} == set(WEIGHT_RULES)


@pytest.mark.parametrize("values", SOUND, ids=str)
def test_what_stands_next_to_a_fault_is_sound(values: dict[str, Any]) -> None:
    config = Config.model_validate(written(GRPO, values))
    assert [problem for rule in WEIGHT_RULES for problem in rule(config)] == []


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (problem,) = host_cache_is_absolute(Config.model_validate(written(GRPO, {CACHE: str(tmp_path / "file")})))
    assert "is a file" in problem.message
