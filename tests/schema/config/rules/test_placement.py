"""`[placement]`: every device has one owner unless sharing is asked for, and lists fit what replicas take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.config import check_config, check_rules, check_warnings
from schema.config.rules.placement import (
    PLACEMENT_RULES,
    devices_are_distinct,
    devices_are_there,
    devices_suffice,
    lists_fit_replicas,
    models_apart_are_whole,
    no_device_is_idle,
    other_roles_share_too,
    others_are_apart,
    sharing_is_asked_for,
    time_share_is_of_common_devices,
)
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import Case, cases, check_case, config_of, never_asked, written

VLLM = {"rollout.backend": "vllm"}
SHARED = VLLM | {"placement.share": "memory"}
TURNS = {"placement.share": "time"}
P, R, REF = "placement.policy", "placement.rollout", "placement.reference"
CRITIC, GAE = "placement.critic", {"train.train_policy.advantage_estimator": "gae", "critic.enable": True}
SAVES = {"train.ckpt.enable_checkpoint": True}
KL = {"train.train_policy.kl_beta": 0.1}
SHARDS = "policy.parallelism.dp_shard_size"

GPUS = "placement.gpus_per_node"
FAULTS = {
    "roles_exist": [
        ({"placement.critic": [1]}, "critic.enable = false"),
        ({"placement.reference": [[1]]}, "[[1]]", "train.train_policy.kl_beta = 0.0"),
        ({"placement.reward_model": [1]}, "reward_model.enable = false"),
    ],
    devices_are_distinct: [
        ({P: [0, 0]}, "device 0", "[0, 0]"),
        ({R: [[1, 2], [2, 3]]}, "device 2", "[[1, 2], [2, 3]]"),
    ],
    sharing_is_asked_for: [
        ({R: [1, 2], P: [0, 1]}, f"{P} = [0, 1]", f"{R} = [1, 2]", "device 1 in common"),
        ({"placement.share": "memory", P: [0], R: [1]}, '"memory"', f"{P} = [0]", f"{R} = [1]"),
    ],
    other_roles_share_too: [
        (
            {"placement.critic": [1, 2], R: [1], "critic.enable": True},
            *("placement.critic = [1, 2]", f"{R} = [1]", "device 1 in common", 'placement.share = "none"'),
        ),
        (
            {"placement.reward_model": [[0]], P: [0], "reward_model.enable": True},
            *("device 0 in common", f"{P} = [0]"),
        ),
    ],
    others_are_apart: [
        ({REF: [0, 1], P: [1, 2], SHARDS: 2} | KL, f"{P} = [1, 2]", "device 1 in common"),
        ({CRITIC: [2, 3], REF: [3, 4], P: [0, 1], SHARDS: 2} | KL | GAE, f"{REF} = [3, 4]", "device 3"),
    ],
    "reference_is_whole": [
        ({"reference.offload": True, REF: [1]} | KL, "true", f"{REF} = [1]"),
        ({"reference.fsdp_wrap_min_params": 1000, REF: [1]} | KL, "1000", f"{REF} = [1]"),
        ({"reference.fsdp_wrap_layers": ["Layer"], REF: [1]} | KL, "Layer", f"{REF} = [1]"),
    ],
    devices_are_there: [
        ({"placement.critic": [4], GPUS: 4, "critic.enable": True}, "device 4"),
        ({R: [7], P: [0], GPUS: 4}, "device 7", f"{GPUS} = 4", "placement.nodes = 1", "4 devices"),
        ({P: [0], GPUS: 0}, "device 0", "gpus_per_node = 0"),
        ({P: [9], "placement.nodes": 2}, "placement.nodes = 2"),
        ({P: [16], "placement.nodes": 2, GPUS: 8}, "16 devices"),
    ],
    lists_fit_replicas: [
        (
            {P: [0, 1, 2, 3], "policy.parallelism.tp_size": 2},
            *("names 4 devices", "policy.parallelism.n_init_replicas = 1 of 2", "tp_size 2"),
        ),
        (
            {P: [0, 1, 2], "policy.parallelism.tp_size": 2, "policy.parallelism.dp_shard_size": -1},
            *("names 3 devices", "tp_size 2", "2 or a multiple"),
        ),
        ({P: [[0], [1]]} | SAVES, "devices of 2 replicas", "policy.parallelism.n_init_replicas = 1"),
        ({R: [[0, 1], [2]], "rollout.parallelism.n_init_replicas": 2}, "2, 1 devices"),
        ({R: [[1, 2]]} | VLLM, "names 2 devices", "n_init_replicas = 1 of 1"),
        ({R: [1, 2, 3]}, "names 3 devices", "take 1"),
        ({R: [[]]}, "names 0 devices"),
        ({REF: [1, 2, 3], SHARDS: 2} | KL, "names 3 devices", "policy.parallelism.n_init_replicas = 1 of 2"),
        ({REF: [2], P: [0, 1], SHARDS: -1} | KL, "names 1 devices", "take 2"),
    ],
    devices_suffice: [
        ({GPUS: 1}, "1 GPUs are fewer than the 2", "policy 1, rollout 1"),
        ({GPUS: 2, P: [0, 1], "policy.parallelism.dp_shard_size": 2}, "2 GPUs are fewer than the 3"),
        ({GPUS: 2, "policy.parallelism.dp_shard_size": 4} | SHARED, "fewer than the 4"),
        ({GPUS: 2, REF: [1]} | KL, "2 GPUs are fewer than the 3", "policy 1, rollout 1, reference 1"),
        ({GPUS: 1, REF: [0]} | KL | SHARED, "1 GPUs are fewer than the 2"),
    ],
    no_device_is_idle: [
        ({GPUS: 4, P: [0], R: [1]}, "device 2, 3 of 4", f"{P} = [0]", f"{R} = [1]"),
        ({GPUS: 100, P: [0], R: [5]}, "device 1, 2, 3, 4, 6, 7, 8, 9 and 90 more"),
    ],
    models_apart_are_whole: [
        ({REF: [2], P: [0, 1], "policy.parallelism.tp_size": 2} | KL, "[2] has one device", "tp_size = 2 makes")
    ],
    time_share_is_of_common_devices: [
        (
            {R: [[0], [1]], P: [0], "rollout.parallelism.n_init_replicas": 2} | TURNS,
            *("device 1", f"{P} = [0]", 'placement.share = "time"'),
        )
    ],
    "memory_is_divided": [({"rollout.gpu_memory_utilization": 0.95} | SHARED, "0.95", 'placement.share = "memory"')],
}
SUPERVISED = {
    "roles_exist": [
        ({R: [1], "rollout.parallelism.tp_size": 1}, "[1]", 'train.train_policy.type = "sft"'),
        ({REF: [[1]]}, "[[1]]", 'train.train_policy.type = "sft"'),
    ],
    sharing_is_asked_for: [
        ({"placement.share": "memory"}, '"memory"', '"sft"'),
        ({"placement.share": "memory", "validation.enable": True, "validation.generate": True}, '"memory"'),
    ],
    devices_suffice: [({GPUS: 2, "policy.parallelism.dp_shard_size": 4}, "fewer than the 4", "(policy 4)")],
    no_device_is_idle: [({GPUS: 2, P: [1]}, "device 0")],
}
CASES = [*cases(FAULTS), *cases(SUPERVISED, SFT)]

SOUND: list[dict[str, Any]] = [
    {},
    {P: [0], R: [1]},
    {P: [[1]], R: [[0]]},
    {P: [0], GPUS: 4},
    {P: [0, 1, 2, 3], "policy.parallelism.dp_shard_size": -1, R: [4], GPUS: 5},
    {P: [3, 2], "policy.parallelism.tp_size": 2, R: [0, 1], "rollout.parallelism.n_init_replicas": 2},
    VLLM | {R: [[0, 1], [2, 3]], "rollout.parallelism.n_init_replicas": 2, "rollout.parallelism.tp_size": 2},
    SHARED | {P: [0], R: [0], GPUS: 1},
    SHARED | {GPUS: 1, "rollout.gpu_memory_utilization": 0.9},
    {GPUS: 0},
    {GPUS: 0} | TURNS,
    VLLM | TURNS | {P: [0, 1], R: [1], SHARDS: 2},
    {REF: [2]} | KL,
    {REF: [3, 2], P: [0, 1], SHARDS: 2, R: [4], GPUS: 5} | KL,
    {REF: [[2, 3]], P: [0, 1], SHARDS: -1} | KL,
    {REF: [1, 0], P: [0, 1], SHARDS: 2, "reference.offload": True} | KL,  # the policy's: sharded over them
    SHARED | {REF: [1], P: [0], R: [0, 1], "rollout.parallelism.tp_size": 2} | KL,
    {"placement.critic": [2], "critic.enable": True},
    {CRITIC: [4, 5], REF: [2, 3], P: [0, 1], SHARDS: 2, R: [6], GPUS: 7} | KL | GAE,
    {P: [0], "placement.critic": [0], "critic.enable": True},
    {P: [0], R: [1], "placement.reward_model": [[2]], "reward_model.enable": True, GPUS: 3},
    {"placement.share": "memory", "rollout.gpu_memory_utilization": 0.95},  # transformers takes no such part
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_faults_come_with_remedies_that_work(case: Case) -> None:
    check_case(case, GRPO)


def test_every_rule_is_tried() -> None:
    assert never_asked(PLACEMENT_RULES, CASES, GRPO) == []


@pytest.mark.parametrize("values", SOUND, ids=str)
def test_sound_placements(values: dict[str, Any]) -> None:
    config = config_of(GRPO, values)
    assert [problem for rule in PLACEMENT_RULES for problem in rule(config)] == []


def test_the_rules_are_asked() -> None:
    found = check_rules(config_of(GRPO, {P: [0, 0]}))
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


devices = st.lists(st.integers(0, 6), max_size=5) | st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=3)


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
        GPUS: per_node,
        "placement.share": share,
        "policy.parallelism.dp_shard_size": shards,
        "rollout.parallelism.n_init_replicas": replicas,
    }
    config = config_of(GRPO, values)
    if [problem for rule in PLACEMENT_RULES for problem in rule(config)]:
        return
    flat = [[d for item in role for d in (item if isinstance(item, list) else [item])] for role in (policy, rollout)]
    assert all(len(role) == len(set(role)) for role in flat)
    if flat[0] and flat[1]:
        assert bool(set(flat[0]) & set(flat[1])) == (share == "memory")
    if flat[1]:
        assert len(flat[1]) == replicas
    if flat[0] and shards != -1:
        assert len(flat[0]) == shards
