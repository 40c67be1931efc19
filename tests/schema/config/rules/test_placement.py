"""`[placement]`: every device has one owner unless sharing is asked for, and lists fit what replicas take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.config import Config, check_config, check_rules, check_warnings
from schema.config.rules.placement import (
    PLACEMENT_RULES,
    devices_are_distinct,
    devices_are_there,
    devices_suffice,
    lists_fit_replicas,
    memory_is_divided,
    no_device_is_idle,
    other_roles_share_too,
    roles_exist,
    sharing_is_asked_for,
)
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import Case, check_case, written

VLLM = {"rollout.backend": "vllm"}
SHARED = VLLM | {"placement.share": "memory"}
P, R = "placement.policy", "placement.rollout"

CASES = [
    Case(roles_exist, {R: [1]}, R, ("[1]", 'train.train_policy.type = "sft"'), SFT),
    Case(roles_exist, {"placement.critic": [1]}, "placement.critic", ("critic.enable = false",)),
    Case(
        roles_exist,
        {"placement.reference": [[1]]},
        "placement.reference",
        ("[[1]]", "train.train_policy.kl_beta = 0.0"),
    ),
    Case(
        roles_exist,
        {"placement.reward_model": [1]},
        "placement.reward_model",
        ("reward_model.enable = false",),
    ),
    Case(devices_are_distinct, {P: [0, 0]}, P, ("device 0", "[0, 0]")),
    Case(devices_are_distinct, {R: [[1, 2], [2, 3]]}, R, ("device 2", "[[1, 2], [2, 3]]")),
    Case(
        sharing_is_asked_for,
        {P: [0, 1], R: [1, 2]},
        R,
        (f"{P} = [0, 1]", f"{R} = [1, 2]", "device 1 in common"),
    ),
    Case(
        sharing_is_asked_for,
        {P: [0], R: [1], "placement.share": "memory"},
        "placement.share",
        ('"memory"', f"{P} = [0]", f"{R} = [1]"),
    ),
    Case(sharing_is_asked_for, {"placement.share": "memory"}, "placement.share", ('"memory"', '"sft"'), SFT),
    Case(
        other_roles_share_too,
        {R: [1], "placement.critic": [1, 2], "critic.enable": True},
        "placement.critic",
        ("placement.critic = [1, 2]", f"{R} = [1]", "device 1 in common", 'placement.share = "none"'),
    ),
    Case(
        other_roles_share_too,
        {P: [0], "placement.reward_model": [[0]], "reward_model.enable": True},
        "placement.reward_model",
        ("device 0 in common", f"{P} = [0]"),
    ),
    Case(
        devices_are_there,
        {"placement.critic": [4], "placement.gpus_per_node": 4, "critic.enable": True},
        "placement.critic",
        ("device 4",),
    ),
    Case(
        devices_are_there,
        {P: [0], R: [7], "placement.gpus_per_node": 4},
        R,
        ("device 7", "placement.gpus_per_node = 4", "placement.nodes = 1", "4 devices"),
    ),
    Case(devices_are_there, {P: [0], "placement.gpus_per_node": 0}, P, ("device 0", "gpus_per_node = 0")),
    Case(devices_are_there, {P: [9], "placement.nodes": 2}, P, ("placement.nodes = 2",)),
    Case(
        devices_are_there, {P: [16], "placement.nodes": 2, "placement.gpus_per_node": 8}, P, ("16 devices",)
    ),
    Case(
        lists_fit_replicas,
        {P: [0, 1, 2, 3], "policy.parallelism.tp_size": 2},
        P,
        ("names 4 devices", "policy.parallelism.n_init_replicas = 1 of 2", "tp_size 2"),
    ),
    Case(
        lists_fit_replicas,
        {P: [0, 1, 2], "policy.parallelism.tp_size": 2, "policy.parallelism.dp_shard_size": -1},
        P,
        ("names 3 devices", "tp_size 2", "2 or a multiple"),
    ),
    Case(
        lists_fit_replicas,
        {P: [[0], [1]]},
        P,
        ("devices of 2 replicas", "policy.parallelism.n_init_replicas = 1"),
    ),
    Case(
        lists_fit_replicas, {R: [[0, 1], [2]], "rollout.parallelism.n_init_replicas": 2}, R, ("2, 1 devices",)
    ),
    Case(lists_fit_replicas, VLLM | {R: [[1, 2]]}, R, ("names 2 devices", "n_init_replicas = 1 of 1")),
    Case(lists_fit_replicas, {R: [1, 2, 3]}, R, ("names 3 devices", "take 1")),
    Case(lists_fit_replicas, {R: [[]]}, R, ("names 0 devices",)),
    Case(
        devices_suffice,
        {"placement.gpus_per_node": 1},
        "placement.gpus_per_node",
        ("1 GPUs are fewer than the 2", "policy 1, rollout 1"),
    ),
    Case(
        devices_suffice,
        {"placement.gpus_per_node": 2, P: [0, 1], "policy.parallelism.dp_shard_size": 2},
        "placement.gpus_per_node",
        ("2 GPUs are fewer than the 3",),
    ),
    Case(
        devices_suffice,
        {"placement.gpus_per_node": 2, "policy.parallelism.dp_shard_size": 4},
        "placement.gpus_per_node",
        ("fewer than the 4", "(policy 4)"),
        SFT,
    ),
    Case(
        devices_suffice,
        SHARED | {"placement.gpus_per_node": 2, "policy.parallelism.dp_shard_size": 4},
        "placement.gpus_per_node",
        ("fewer than the 4",),
    ),
    Case(
        no_device_is_idle,
        {"placement.gpus_per_node": 4, P: [0], R: [1]},
        "placement.gpus_per_node",
        ("device 2, 3 of 4", f"{P} = [0]", f"{R} = [1]"),
    ),
    Case(
        no_device_is_idle,
        {"placement.gpus_per_node": 100, P: [0], R: [5]},
        "placement.gpus_per_node",
        ("device 1, 2, 3, 4, 6, 7, 8, 9 and 90 more",),
    ),
    Case(
        no_device_is_idle,
        {"placement.gpus_per_node": 2, P: [1]},
        "placement.gpus_per_node",
        ("device 0",),
        SFT,
    ),
    Case(
        memory_is_divided,
        SHARED | {"rollout.gpu_memory_utilization": 0.95},
        "rollout.gpu_memory_utilization",
        ("0.95", 'placement.share = "memory"'),
    ),
]

SOUND: list[dict[str, Any]] = [
    {},
    {P: [0], R: [1]},
    {P: [[1]], R: [[0]]},
    {P: [0], "placement.gpus_per_node": 4},
    {P: [0, 1, 2, 3], "policy.parallelism.dp_shard_size": -1, R: [4], "placement.gpus_per_node": 5},
    {P: [3, 2], "policy.parallelism.tp_size": 2, R: [0, 1], "rollout.parallelism.n_init_replicas": 2},
    VLLM | {R: [[0, 1], [2, 3]], "rollout.parallelism.n_init_replicas": 2, "rollout.parallelism.tp_size": 2},
    SHARED | {P: [0], R: [0], "placement.gpus_per_node": 1},
    SHARED | {"placement.gpus_per_node": 1, "rollout.gpu_memory_utilization": 0.9},
    {"placement.gpus_per_node": 0},
    {"placement.reference": [2], "train.train_policy.kl_beta": 0.1},
    {"placement.critic": [2], "critic.enable": True},
    {P: [0], "placement.critic": [0], "critic.enable": True},
    {
        P: [0],
        R: [1],
        "placement.reward_model": [[2]],
        "reward_model.enable": True,
        "placement.gpus_per_node": 3,
    },
    {"placement.share": "memory", "rollout.gpu_memory_utilization": 0.95},  # transformers takes no such part
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_faults_come_with_remedies_that_work(case: Case) -> None:
    check_case(case, GRPO)


def test_every_rule_is_tried() -> None:
    assert {case.rule for case in CASES} == set(PLACEMENT_RULES)


@pytest.mark.parametrize("values", SOUND, ids=str)
def test_sound_placements(values: dict[str, Any]) -> None:
    config = Config.model_validate(written(GRPO, values))
    assert [problem for rule in PLACEMENT_RULES for problem in rule(config)] == []


def test_the_rules_are_asked() -> None:
    found = check_rules(Config.model_validate(written(GRPO, {P: [0, 0]})))
    assert {problem.key for problem in found} == {P}


def test_sharing_says_what_to_write() -> None:
    problem = check_case(Case(sharing_is_asked_for, {P: [0], R: [0]}, R), GRPO)
    assert problem.hint.startswith('write placement.share = "memory"')


@pytest.mark.parametrize(("share", "warned"), [(0.5, False), (0.6, False), (0.61, True), (0.9, True)])
def test_an_engine_that_takes_much_is_a_warning(share: float, warned: bool) -> None:
    data = written(GRPO, SHARED | {"rollout.gpu_memory_utilization": share})
    keys = [problem.key for problem in check_warnings(check_config(data))]
    assert ("rollout.gpu_memory_utilization" in keys) == warned
    alone = written(data, {"placement.share": "none"})
    assert "rollout.gpu_memory_utilization" not in [p.key for p in check_warnings(check_config(alone))]


devices = st.lists(st.integers(0, 6), max_size=5) | st.lists(
    st.lists(st.integers(0, 6), max_size=3), max_size=3
)


@given(
    policy=devices,
    rollout=devices,
    per_node=st.none() | st.integers(0, 7) | st.just(1024),
    shards=st.sampled_from([-1, 1, 2]),
    replicas=st.integers(1, 3),
    share=st.sampled_from(["none", "memory"]),
)
def test_what_the_rules_let_pass_has_one_owner_each(
    policy: list[Any], rollout: list[Any], per_node: int | None, shards: int, replicas: int, share: str
) -> None:
    values = {
        P: policy,
        R: rollout,
        "placement.gpus_per_node": per_node,
        "placement.share": share,
        "policy.parallelism.dp_shard_size": shards,
        "rollout.parallelism.n_init_replicas": replicas,
    }
    config = Config.model_validate(written(GRPO, values))
    if [problem for rule in PLACEMENT_RULES for problem in rule(config)]:
        return
    flat = [
        [d for item in role for d in (item if isinstance(item, list) else [item])]
        for role in (policy, rollout)
    ]
    assert all(len(role) == len(set(role)) for role in flat)
    if flat[0] and flat[1]:
        assert bool(set(flat[0]) & set(flat[1])) == (share == "memory")
    if flat[1]:
        assert len(flat[1]) == replicas
    if flat[0] and shards != -1:
        assert len(flat[0]) == shards
