"""`[weight_sync]`: where versions lie, who reaches them, and what a cache that is kept rules out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config.rules.checkpoint import (
    WEIGHT_RULES,
    host_cache_is_absolute,
    store_is_a_place,
    store_is_reached_from_all_hosts,
)
from tests.schema.config_samples import GRPO
from tests.schema.remedies import Case, cases, check_case, config_of, never_asked

P, STORE, CACHE = "train.train_policy", "weight_sync.store", "weight_sync.host_cache"
FIX = f"{P}.rollout_correction"
KEEP = {"weight_sync.update_mode": "keep_kv"}
HOSTS = {"placement.nodes": 2}

FAULTS = {
    store_is_a_place: [
        ({STORE: "gs://bucket/x"}, "gs://bucket/x"),
        ({STORE: "s3://"}, "bucket"),
        ({STORE: "s3://My_Bucket/x"}, "My_Bucket"),
        ({STORE: "s3://bucket/a//b"}, "a//b"),
        ({STORE: "s3://bucket/../b"}, "../b"),
        ({STORE: "s3://key:secret@bucket/b"}, "AWS_SECRET_ACCESS_KEY", "'@'"),
        ({STORE: "s3:/bucket/x"}, "s3:/bucket/x"),
        ({STORE: "file/in/it"}, "file"),
        ({STORE: "~/weights"}, "~/weights"),
        ({STORE: "file"}, "file"),
    ],
    store_is_reached_from_all_hosts: [
        ({STORE: "/dev/shm/weights"} | HOSTS, "/dev/shm/weights", "placement.nodes = 2")
    ],
    host_cache_is_absolute: [({CACHE: value}, value) for value in ("weights", "~/weights", "s3://bucket/x")],
    "a_kept_cache_has_engine_probabilities": [
        (KEEP | {f"{P}.use_decoupled_loss": True}, "keep_kv", f"{P}.use_decoupled_loss = true"),
        (KEEP | {f"{FIX}.weights": "token"}, "keep_kv", f'{FIX}.weights = "token"'),
        (KEEP | {f"{FIX}.reject": "token", f"{FIX}.reject_above": 2.0}, *("keep_kv", f'{FIX}.reject = "token"')),
        (KEEP | {f"{FIX}.off_policy_mask": 0.05}, "keep_kv", f"{FIX}.off_policy_mask = 0.05"),
    ],
}
BY_OUTPUT = HOSTS | {"train.output_dir": "/tmp/runs"}
CASES = [*cases(FAULTS), Case(store_is_reached_from_all_hosts, BY_OUTPUT, STORE, ("/tmp/runs",))]

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
    assert never_asked(WEIGHT_RULES, CASES, GRPO) == []


@pytest.mark.parametrize("values", SOUND, ids=str)
def test_what_stands_next_to_a_fault_is_sound(values: dict[str, Any]) -> None:
    config = config_of(GRPO, values)
    assert [problem for rule in WEIGHT_RULES for problem in rule(config)] == []


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (problem,) = host_cache_is_absolute(config_of(GRPO, {CACHE: str(tmp_path / "file")}))
    assert "is a file" in problem.message
