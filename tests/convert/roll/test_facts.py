"""ROLL's batches, meshes and devices, each by hand from its configuration guide's formulas."""

from __future__ import annotations

from typing import Any

import pytest

from convert.engine.model import Outcome
from tests.convert.files import ABSENT, roll_with, value_of
from tests.schema.config_samples import refused

_TRAINING = "actor_train.training_args"
_CONFIG = "actor_train.strategy_args.strategy_config"
_PER_OPTIMIZE = "train.train_policy.batch_size_per_optimize"


def _megatron(**sizes: int) -> dict[str, Any]:
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    keys = {f"{_CONFIG}.{names[name]}_parallel_size": size for name, size in sizes.items()}
    return {"actor_train.strategy_args.strategy_name": "megatron_train", **keys}


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        # 1 · 32 · 16 = 512 = 64 · 8: the page's own numbers, one optimizer step
        ({}, None),
        # 2 · 4 · 16 = 128 of 512: four optimizer steps
        ({f"{_TRAINING}.per_device_train_batch_size": 2, f"{_TRAINING}.gradient_accumulation_steps": 4}, 128),
        # ulysses divides: 1 · 32 · 16 / 4 = 128
        ({"actor_train.model_args.ulysses_size": 4}, 128),
        # megatron: 1 · 32 · 16 / (2 · 2 · 2) = 64
        (_megatron(tp=2, pp=2, cp=2), 64),
        # experts divide nothing: 1 · 32 · 16 / 2 = 256
        (_megatron(tp=2, ep=4), 256),
        # tp · pp · cp = 4, 128 accumulations: 1 · 128 · 16 / 4 = 512, one optimizer step
        ({**_megatron(tp=2, pp=2), f"{_TRAINING}.gradient_accumulation_steps": 128}, None),
        # ROLL's defaults, 8 · 1 · 16 = 128
        (
            {f"{_TRAINING}.per_device_train_batch_size": ABSENT, f"{_TRAINING}.gradient_accumulation_steps": ABSENT},
            128,
        ),
        # DeepSpeed counts like FSDP2
        (
            {
                "actor_train.strategy_args.strategy_name": "deepspeed_train",
                f"{_TRAINING}.gradient_accumulation_steps": 8,
            },
            128,
        ),
    ],
)
def test_global_batch(changes: dict[str, Any], batch: int | None) -> None:
    found = roll_with(changes)
    assert value_of(found, "train.train_batch_per_replica") == 64 * 8
    assert value_of(found, "rollout.n_generation") == 8
    assert value_of(found, _PER_OPTIMIZE) == batch
    assert not found.of(Outcome.UNKNOWN)
    assert not found.warnings


def test_global_batch_beyond_the_rollout_says_what_would_fit() -> None:
    found = roll_with({f"{_TRAINING}.gradient_accumulation_steps": 64})
    assert value_of(found, _PER_OPTIMIZE) is None
    assert len(found.warnings) == 1
    assert "1·64·16 = 1024 is more than the 512 samples" in found.warnings[0]
    assert "32 would make it one optimizer step" in found.warnings[0]


def test_global_batch_that_does_not_divide_is_said() -> None:
    found = roll_with({f"{_TRAINING}.gradient_accumulation_steps": 20})
    assert value_of(found, _PER_OPTIMIZE) == 320
    assert "does not divide the 512 samples" in found.warnings[0]


def test_global_batch_that_is_no_number_is_not_understood() -> None:
    found = roll_with({**_megatron(tp=8, pp=2), f"{_TRAINING}.gradient_accumulation_steps": 0})
    entry = found.entry(f"{_TRAINING}.gradient_accumulation_steps")
    assert entry.outcome is Outcome.UNSUPPORTED
    assert "not a whole number of samples" in entry.note


def test_agents_count_trajectories() -> None:
    changes = {
        "num_return_sequences_in_group": ABSENT,
        "rollout_batch_size": 128,
        "train_env_manager.group_size": 8,
        f"{_TRAINING}.gradient_accumulation_steps": 4,
    }
    found = roll_with(changes)
    assert value_of(found, "train.train_batch_per_replica") == 128
    assert value_of(found, "rollout.n_generation") == 8
    assert value_of(found, _PER_OPTIMIZE) == 64


@pytest.mark.parametrize(
    ("size", "ulysses", "shard", "replicate"),
    [(0, 1, 16, 1), (1, 1, 16, 1), (16, 1, 16, 1), (64, 1, 16, 1), (4, 1, 4, 4), (8, 2, 4, 2), (1, 4, 4, 1)],
)
def test_fsdp_size_by_rolls_rule(size: int, ulysses: int, shard: int, replicate: int) -> None:
    found = roll_with({f"{_CONFIG}.fsdp_size": size, "actor_train.model_args.ulysses_size": ulysses})
    mesh = value_of(found, "policy.parallelism")
    assert (mesh["dp_shard_size"], mesh["dp_replicate_size"]) == (shard, replicate)
    assert mesh["tp_size"] == 1
    assert mesh["dp_shard_size"] * mesh["dp_replicate_size"] * ulysses == 16


@pytest.mark.parametrize("size", [3, 5])
def test_fsdp_size_that_does_not_fit(size: int) -> None:
    found = roll_with({f"{_CONFIG}.fsdp_size": size})
    assert found.entry(f"{_CONFIG}.fsdp_size").outcome is Outcome.UNKNOWN


def test_megatron_mesh() -> None:
    found = roll_with(_megatron(tp=2, pp=2, cp=2, ep=2))
    mesh = value_of(found, "policy.parallelism")
    sizes = {"tp_size": 2, "pp_size": 2, "cp_size": 2, "ep_size": 2, "dp_shard_size": 2}
    assert mesh == {**sizes, "pp_micro_batch_size": 1}


def test_a_pipeline_takes_its_pieces_together() -> None:
    found = roll_with(_megatron(pp=4))
    assert value_of(found, "train.train_policy.mini_batch") == 32
    per_device = f"{_TRAINING}.per_device_train_batch_size"
    found = roll_with({**_megatron(pp=4), per_device: 2, f"{_TRAINING}.gradient_accumulation_steps": 6})
    assert value_of(found, "train.train_policy.mini_batch") == 8  # 6 pieces are no multiple of 4 stages


def test_megatron_mesh_that_does_not_fit() -> None:
    found = roll_with(_megatron(tp=3))
    entry = found.entry("actor_train.device_mapping")
    assert entry.outcome is Outcome.UNKNOWN
    assert "does not divide" in entry.note


# --- devices ------------------------------------------------------------------------------------------------


def test_engines_are_cut_by_their_size() -> None:
    found = roll_with({"actor_infer.strategy_args.strategy_config.tensor_parallel_size": 4})
    assert value_of(found, "placement.rollout") == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert value_of(found, "rollout.parallelism") == {"n_init_replicas": 2, "tp_size": 4, "pp_size": 1}


def test_gpus_per_worker_is_the_size_where_the_engine_is_silent() -> None:
    found = roll_with({"actor_infer.num_gpus_per_worker": 2})
    assert value_of(found, "rollout.parallelism.tp_size") == 2
    assert value_of(found, "rollout.parallelism.n_init_replicas") == 4
    pipeline = {"actor_infer.strategy_args.strategy_config.pipeline_parallel_size": 2}
    found = roll_with({"actor_infer.num_gpus_per_worker": 4, **pipeline})
    assert value_of(found, "rollout.parallelism") == {"n_init_replicas": 2, "tp_size": 2, "pp_size": 2}


def test_engines_that_do_not_fit_their_devices() -> None:
    found = roll_with({"actor_infer.num_gpus_per_worker": 3})
    assert found.entry("actor_infer.device_mapping").outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("infer", ["list(range(0,16))", "list(range(0,12))", "[15] + list(range(16,23))"])
def test_overlapping_devices_are_shared_in_turns(infer: str) -> None:
    found = roll_with({"actor_infer.device_mapping": infer})
    entry = found.entry("actor_infer.device_mapping")
    assert ("placement.share", "time") in (entry.faithful or entry.targets)
    assert value_of(found, "placement.share") in ("time", "memory")
    assert value_of(found, "placement.policy") == list(range(16))


def test_separate_devices_are_not_shared() -> None:
    found = roll_with()
    assert value_of(found, "placement.share") is None
    assert value_of(found, "placement.policy") == list(range(16))
    assert value_of(found, "placement.rollout") == list(range(16, 24))
    assert value_of(found, "placement.nodes") == 3


def test_machines_follow_from_the_devices() -> None:
    found = roll_with({"num_gpus_per_node": 16, "actor_infer.device_mapping": "list(range(16,32))"})
    assert (value_of(found, "placement.gpus_per_node"), value_of(found, "placement.nodes")) == (16, 2)
    found = roll_with({"actor_train.device_mapping": "[0]", "actor_infer.device_mapping": "[2]"})
    assert value_of(found, "placement.gpus_per_node") is None  # device 1 is left alone
    found = roll_with(
        {"actor_train.device_mapping": "[0]", "actor_infer.device_mapping": "[1]", "num_gpus_per_node": 2}
    )
    assert value_of(found, "placement.gpus_per_node") == 2
    found = roll_with(  # counted, not listed: a mistyped number would fill the memory
        {"actor_train.device_mapping": "[0]", "actor_infer.device_mapping": "[1]", "num_gpus_per_node": 10**12}
    )
    assert value_of(found, "placement.gpus_per_node") is None


def test_reference_has_its_own_devices() -> None:
    found = roll_with({"use_kl_loss": True, "kl_loss_coef": 0.01, "reference.device_mapping": "[24, 25]"})
    assert value_of(found, "placement.reference") == [24, 25]
    assert value_of(found, "reference.parallelism") == {"tp_size": 1, "dp_shard_size": 2}
    same = roll_with({"use_kl_loss": True, "kl_loss_coef": 0.01, "reference.device_mapping": "list(range(0,16))"})
    assert same.entry("reference.device_mapping").outcome is Outcome.IMPLICIT
    unused = roll_with({"reference.device_mapping": "[24, 25]"})
    assert value_of(unused, "placement.reference") is None


@pytest.mark.parametrize("role", ["actor_train", "actor_infer", "rewards.math_rule"])
@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "list(range(0,10**9))", "list(range(8,0,-1))", "[0, 0]", "8"]
)
def test_hostile_mappings_are_errors_with_a_line(role: str, text: str) -> None:
    problem = refused(roll_with, {f"{role}.device_mapping": text})[0]
    assert problem.key == f"{role}.device_mapping"
    assert problem.line is not None
    assert problem.value in (text, 8)


def test_warm_up_counts_training_steps() -> None:
    changes = {f"{_TRAINING}.gradient_accumulation_steps": 8, f"{_TRAINING}.warmup_steps": 42, "ppo_epochs": 2}
    found = roll_with(changes)  # 512 / 128 = 4 optimizer steps, twice: 8 in each training step
    assert value_of(found, "train.optm_warmup_steps") == 6
    inverse = roll_with({f"{_TRAINING}.lr_scheduler_type": "inverse_sqrt", f"{_TRAINING}.optim": "adamw_bnb_8bit"})
    assert value_of(inverse, "train.optm_decay_type") == "inverse_sqrt"
    assert value_of(inverse, "train.optm_decay_ratio") is None
    assert value_of(inverse, "train.optm_name") == "AdamW8bit"
    assert roll_with({f"{_TRAINING}.warmup_ratio": 0.1}).config["train"]["optm_warmup_steps"] == 0.1


def test_schedule_decays_after_the_warm_up() -> None:
    changes = {"max_steps": 200, f"{_TRAINING}.warmup_steps": 20, f"{_TRAINING}.lr_scheduler_type": "cosine"}
    train = roll_with(changes).config["train"]
    assert (train["optm_decay_type"], train["optm_decay_ratio"]) == ("cosine", 0.9)
    constant = roll_with({f"{_TRAINING}.lr_scheduler_type": "constant"}).config["train"]
    assert constant["optm_decay_type"] == "none"
    assert "optm_decay_ratio" not in constant


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(300, 9, (300, 300)), (-1, 9, (None, 9)), (-1, 2.5, (None, 3))]
)
def test_length_of_the_run(steps: int, epochs: float, expected: tuple[int | None, int]) -> None:
    found = roll_with({"max_steps": steps, f"{_TRAINING}.num_train_epochs": epochs})
    assert (value_of(found, "train.max_num_steps"), value_of(found, "train.epoch")) == expected


@pytest.mark.parametrize(("ratio", "bound"), [(0, 0), (1, 1), (1.5, 2), (0.25, 1)])
def test_async_ratio_is_a_bound(ratio: float, bound: int) -> None:
    found = roll_with({"async_generation_ratio": ratio})
    assert value_of(found, "train.train_policy.allowed_outdated_steps") == bound


def test_surplus_prompts() -> None:
    found = roll_with({"is_use_additional_prompts": True, "max_additional_running_prompts": 16})
    assert value_of(found, "controller.oversample") == 1.25
    assert value_of(roll_with({"max_additional_running_prompts": 16}), "controller.oversample") is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"recompute_granularity": None, "moe_layer_recompute": True}, (True, None, True)),
        ({"moe_layer_recompute": True}, (True, None, True)),
        ({"recompute_granularity": "selective", "moe_layer_recompute": True}, (True, "selective", True)),
        ({"recompute_granularity": "full", "moe_layer_recompute": True}, (True, "full", None)),
        ({"recompute_granularity": "full", "moe_layer_recompute": False}, (True, "full", False)),
        ({"recompute_granularity": None, "moe_layer_recompute": False}, (False, None, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("role", ["actor_train", "critic"])
def test_what_is_recomputed(role: str, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Experts independently of the rest, as Megatron does."""
    written = {f"{role}.strategy_args.strategy_config.{name}": value for name, value in keys.items()}
    changes = {f"{role}.strategy_args.strategy_name": "megatron_train", "adv_estimator": "gae", **written}
    found = dict(target for entry in roll_with(changes).entries for target in entry.targets)
    model, section = ("policy", "train") if role == "actor_train" else (role, role)
    names = ("recompute_granularity", "recompute_moe_layers")
    values = (found.get(f"{section}.{name}") for name in names)
    assert (found.get(f"{model}.model_gradient_checkpointing"), *values) == expected
