"""What ROLL's keys come to: batches, meshes and devices by hand from its guide's formulas, and other values."""

from __future__ import annotations

from typing import Any

import pytest

from convert.engine.model import Outcome
from tests.convert.files import ABSENT, roll_with, value_of, values_of
from tests.schema.config_samples import refused

_TRAINING = "actor_train.training_args"
_CONFIG = "actor_train.strategy_args.strategy_config"
_ENGINE = "actor_infer.strategy_args.strategy_config"
_STRATEGY = "actor_train.strategy_args.strategy_name"
_ULYSSES, _MAPPING = "actor_train.model_args.ulysses_size", "actor_infer.device_mapping"
_BATCH, _SAMPLES = "train.train_batch_per_replica", "rollout.n_generation"
_POLICY, _MESH, _ENGINES = "train.train_policy", "policy.parallelism", "rollout.parallelism"
_PER_OPTIMIZE = f"{_POLICY}.batch_size_per_optimize"
_LONGEST = ("rollout.max_response_length", "policy.model_max_length")


def _megatron(**sizes: int) -> dict[str, Any]:
    names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
    keys = {f"{_CONFIG}.{names[name]}_parallel_size": size for name, size in sizes.items()}
    return {_STRATEGY: "megatron_train", **keys}


def _training(**keys: Any) -> dict[str, Any]:
    return {f"{_TRAINING}.{key}": value for key, value in keys.items()}


def _engine(**keys: Any) -> dict[str, Any]:
    return {f"{_ENGINE}.{key}": value for key, value in keys.items()}


def _devices(train: str, infer: str, **more: Any) -> dict[str, Any]:
    return {"actor_train.device_mapping": train, _MAPPING: infer, **more}


@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        # 1 · 32 · 16 = 512 = 64 · 8: the page's own numbers, one optimizer step
        ({}, None),
        # 2 · 4 · 16 = 128 of 512: four optimizer steps
        (_training(per_device_train_batch_size=2, gradient_accumulation_steps=4), 128),
        # ulysses divides: 1 · 32 · 16 / 4 = 128
        ({_ULYSSES: 4}, 128),
        # megatron: 1 · 32 · 16 / (2 · 2 · 2) = 64
        (_megatron(tp=2, pp=2, cp=2), 64),
        # experts divide nothing: 1 · 32 · 16 / 2 = 256
        (_megatron(tp=2, ep=4), 256),
        # tp · pp · cp = 4, 128 accumulations: 1 · 128 · 16 / 4 = 512, one optimizer step
        ({**_megatron(tp=2, pp=2), **_training(gradient_accumulation_steps=128)}, None),
        # ROLL's defaults, 8 · 1 · 16 = 128
        (_training(per_device_train_batch_size=ABSENT, gradient_accumulation_steps=ABSENT), 128),
        # DeepSpeed counts like FSDP2
        ({_STRATEGY: "deepspeed_train", **_training(gradient_accumulation_steps=8)}, 128),
    ],
)
def test_global_batch(changes: dict[str, Any], batch: int | None) -> None:
    found = roll_with(changes)
    assert values_of(found, (_BATCH, _SAMPLES, _PER_OPTIMIZE)) == {
        _BATCH: 64 * 8, _SAMPLES: 8, _PER_OPTIMIZE: batch
    }  # fmt: skip
    assert not found.of(Outcome.UNKNOWN)
    assert not found.warnings


_SHARDS = {(0, 1): (16, 1), (1, 1): (16, 1), (16, 1): (16, 1), (64, 1): (16, 1), (4, 1): (4, 4), (8, 2): (4, 2)}
_SHARDS[1, 4] = (4, 1)
"""Sizes of FSDP and Ulysses over 16 ranks -> shards and their copies."""
_SIZES = ("tp_size", "pp_size", "cp_size", "ep_size", "dp_shard_size")
_REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.01}
_ARGUMENTS = {
    "seed": ("rollout.seed", 3),
    "trust_remote_code": ("policy.trust_remote_code", True),
    "tokenizer": ("policy.tokenizer_name_or_path", "org/tokens"),
    "revision": ("policy.model_revision", "main"),
    "quantization": ("rollout.quantization", "fp8"),
    "max_num_seqs": ("rollout.max_num_seqs", 64),
    "max_num_batched_tokens": ("rollout.max_num_batched_tokens", 4096),
    "enforce_eager": ("rollout.enforce_eager", False),
    "enable_chunked_prefill": ("rollout.enable_chunked_prefill", True),
    "block_size": ("rollout.block_size", 32),
}
_DOMAINS = "actor_train.data_args.domain_interleave_probs"
FACTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # agents count trajectories
    (
        {"num_return_sequences_in_group": ABSENT, "rollout_batch_size": 128, "train_env_manager.group_size": 8}
        | _training(gradient_accumulation_steps=4),
        {_BATCH: 128, _SAMPLES: 8, _PER_OPTIMIZE: 64},
    ),
    # meshes
    *(
        (
            {f"{_CONFIG}.fsdp_size": size, _ULYSSES: ulysses},
            {f"{_MESH}.dp_shard_size": shards, f"{_MESH}.dp_replicate_size": copies, f"{_MESH}.tp_size": 1},
        )
        for (size, ulysses), (shards, copies) in _SHARDS.items()
    ),
    (_megatron(tp=2, pp=2, cp=2, ep=2), {_MESH: dict.fromkeys(_SIZES, 2) | {"pp_micro_batch_size": 1}}),
    # all pieces pass through the pipeline together; 6 pieces are not a multiple of 4 stages
    (_megatron(pp=4), {f"{_POLICY}.mini_batch": 32}),
    (
        {**_megatron(pp=4), **_training(per_device_train_batch_size=2, gradient_accumulation_steps=6)},
        {f"{_POLICY}.mini_batch": 8},
    ),
    # engines are cut by their size; GPUs of a worker are the size where the engine is silent
    (
        _engine(tensor_parallel_size=4),
        {f"{_ENGINES}.tp_size": 4, "placement.rollout": [[16, 17, 18, 19], [20, 21, 22, 23]]},
    ),
    ({"actor_infer.num_gpus_per_worker": 2}, {f"{_ENGINES}.tp_size": 2, f"{_ENGINES}.n_init_replicas": 4}),
    (
        {"actor_infer.num_gpus_per_worker": 4, **_engine(pipeline_parallel_size=2)},
        {_ENGINES: {"n_init_replicas": 2, "tp_size": 2, "pp_size": 2}},
    ),
    # devices that are apart, machines that follow from them; device 1 of three is left alone
    ({}, {"placement.share": None, "placement.nodes": 3}),
    ({}, {"placement.policy": [*range(16)], "placement.rollout": [*range(16, 24)]}),
    (
        {"num_gpus_per_node": 16, _MAPPING: "list(range(16,32))"},
        {"placement.gpus_per_node": 16, "placement.nodes": 2},
    ),
    (_devices("[0]", "[2]"), {"placement.gpus_per_node": None}),
    (_devices("[0]", "[1]", num_gpus_per_node=2), {"placement.gpus_per_node": 2}),
    # counted, not listed: a mistyped number would fill the memory
    (_devices("[0]", "[1]", num_gpus_per_node=10**12), {"placement.gpus_per_node": None}),
    (
        {**_REFERENCE, "reference.device_mapping": "[24, 25]"},
        {"placement.reference": [24, 25], "reference.parallelism": {"tp_size": 1, "dp_shard_size": 2}},
    ),
    ({**_REFERENCE, "reference.device_mapping": "list(range(0,16))"}, {"placement.reference": None}),
    ({"reference.device_mapping": "[24, 25]"}, {"placement.reference": None}),
    # warm-up counts training steps: 512 / 128 = 4 optimizer steps, twice: 8 in each
    (_training(gradient_accumulation_steps=8, warmup_steps=42) | {"ppo_epochs": 2}, {"train.optm_warmup_steps": 6}),
    (_training(warmup_ratio=0.1), {"train.optm_warmup_steps": 0.1}),
    (
        _training(lr_scheduler_type="inverse_sqrt", optim="adamw_bnb_8bit"),
        {"train.optm_decay_type": "inverse_sqrt", "train.optm_decay_ratio": None, "train.optm_name": "AdamW8bit"},
    ),
    (
        _training(warmup_steps=20, lr_scheduler_type="cosine") | {"max_steps": 200},
        {"train.optm_decay_type": "cosine", "train.optm_decay_ratio": 0.9},
    ),
    (_training(lr_scheduler_type="constant"), {"train.optm_decay_type": "none", "train.optm_decay_ratio": None}),
    # the length of the run
    *(
        ({"max_steps": n, **_training(num_train_epochs=epochs)}, {"train.max_num_steps": most, "train.epoch": ours})
        for n, epochs, most, ours in ((300, 9, 300, 300), (-1, 9, None, 9), (-1, 2.5, None, 3))
    ),
    # the asynchronous ratio is a bound, and prompts beyond a batch a factor
    *(
        ({"async_generation_ratio": ratio}, {f"{_POLICY}.allowed_outdated_steps": bound})
        for ratio, bound in ((0, 0), (1, 1), (1.5, 2), (0.25, 1))
    ),
    ({"is_use_additional_prompts": True, "max_additional_running_prompts": 16}, {"controller.oversample": 1.25}),
    ({"max_additional_running_prompts": 16}, {"controller.oversample": None}),
    # types, kernels and lengths
    (
        {"actor_train.model_args.attn_implementation": "fa3", "actor_train.model_args.dtype": "fp16"},
        {"train.fa_version": 3, "train.param_dtype": "float16", "train.master_dtype": None},
    ),
    ({"response_length": 4096}, dict(zip(_LONGEST, (4096, 5120), strict=True))),
    ({"prompt_length": ABSENT, "response_length": 100}, dict(zip(_LONGEST, (100, 1124), strict=True))),
    ({"response_length": ABSENT, "sequence_length": 3000}, dict(zip(_LONGEST, (1976, 3000), strict=True))),
    ({"sequence_length": 3000}, dict(zip(_LONGEST, (1976, 3000), strict=True))),
    # arguments of the engine pass through, or go to a key of ours
    (
        {f"{_ENGINE}.swap_space": 4, f"{_ENGINE}.compilation_config.level": 3},
        {"rollout.engine_kwargs": {"swap_space": 4, "compilation_config": {"level": 3}}},
    ),
    (
        _engine(**{name: value for name, (_, value) in _ARGUMENTS.items()}),
        dict(_ARGUMENTS.values()) | {"rollout.engine_kwargs": None},
    ),
    (_engine(enable_expert_parallel=True, tensor_parallel_size=4), {f"{_ENGINES}.ep_size": 4}),
    (
        _engine(enable_expert_parallel=True, tensor_parallel_size=2, data_parallel_size=2),
        {f"{_ENGINES}.ep_size": 4, f"{_ENGINES}.dp_shard_size": 2},
    ),
    # clips of the ratio
    ({}, {f"{_POLICY}.epsilon_low": None, f"{_POLICY}.epsilon_high": None, f"{_POLICY}.lower_bound_ratio": 1e9}),
    ({"pg_clip": 0.1}, {f"{_POLICY}.epsilon_low": 0.1, f"{_POLICY}.epsilon_high": 0.1}),
    (
        {"pg_clip": 0.1, "use_pg_clip_range": True, "pg_clip_high": 0.28},
        {f"{_POLICY}.epsilon_low": None, f"{_POLICY}.epsilon_high": 0.28},
    ),
    ({"pg_clip_high": 0.28}, {f"{_POLICY}.epsilon_low": None, f"{_POLICY}.epsilon_high": None}),
    ({"dual_clip_loss": True}, {f"{_POLICY}.lower_bound_ratio": 1.4}),
    ({"dual_clip_loss": True, "pg_clip": 0.1}, {f"{_POLICY}.lower_bound_ratio": 1.2}),
    ({"dual_clip_loss": False}, {f"{_POLICY}.lower_bound_ratio": 1e9}),
    # losses and their averages
    ({"importance_sampling": "seq"}, {f"{_POLICY}.variant": "gspo", f"{_POLICY}.lower_bound_ratio": None}),
    ({"use_policy_loss_type": "PG"}, {f"{_POLICY}.variant": "reinforce", f"{_POLICY}.lower_bound_ratio": None}),
    *(
        ({"loss_agg_mode": mode}, {f"{_POLICY}.loss_type": mode})
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    ),
    ({"kl_loss_coef": 0.01}, {f"{_POLICY}.kl_beta": None}),
    ({"kl_loss_coef": 0.01, "use_kl_loss": True}, {f"{_POLICY}.kl_beta": 0.01}),
    # shares of domains
    (
        {f"{_DOMAINS}.math": 0.75, f"{_DOMAINS}.code": 0.25},
        {f"{_POLICY}.domain_shares": {"math": 0.75, "code": 0.25}, f"{_POLICY}.domain_column_name": "tag"},
    ),
    ({f"{_DOMAINS}.math": 1.0}, {f"{_POLICY}.domain_shares": None}),
]
"""Changes of a small file, and what our keys hold then."""


@pytest.mark.parametrize(("changes", "expected"), FACTS)
def test_a_file_comes_to_these_values(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert values_of(roll_with(changes), expected) == expected


@pytest.mark.parametrize(
    ("changes", "key", "outcome", "words"),
    [
        (
            {**_megatron(tp=8, pp=2), **_training(gradient_accumulation_steps=0)},
            f"{_TRAINING}.gradient_accumulation_steps", Outcome.UNSUPPORTED, "not a whole number of samples",
        ),
        ({f"{_CONFIG}.fsdp_size": 3}, f"{_CONFIG}.fsdp_size", Outcome.UNKNOWN, ""),
        ({f"{_CONFIG}.fsdp_size": 5}, f"{_CONFIG}.fsdp_size", Outcome.UNKNOWN, ""),
        (_megatron(tp=3), "actor_train.device_mapping", Outcome.UNKNOWN, "does not divide"),
        ({"actor_infer.num_gpus_per_worker": 3}, _MAPPING, Outcome.UNKNOWN, ""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_not_understood(changes: dict[str, Any], key: str, outcome: Outcome, words: str) -> None:
    entry = roll_with(changes).entry(key)
    assert entry.outcome is outcome
    assert words in entry.note


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


# --- devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("infer", ["list(range(0,16))", "list(range(0,12))", "[15] + list(range(16,23))"])
def test_overlapping_devices_are_shared_in_turns(infer: str) -> None:
    found = roll_with({"actor_infer.device_mapping": infer})
    entry = found.entry("actor_infer.device_mapping")
    assert ("placement.share", "time") in (entry.faithful or entry.targets)
    assert value_of(found, "placement.share") in ("time", "memory")
    assert value_of(found, "placement.policy") == list(range(16))


@pytest.mark.parametrize("role", ["actor_train", "actor_infer", "rewards.math_rule"])
@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "list(range(0,10**9))", "list(range(8,0,-1))", "[0, 0]", "8"]
)
def test_hostile_mappings_are_errors_with_a_line(role: str, text: str) -> None:
    problem = refused(roll_with, {f"{role}.device_mapping": text})[0]
    assert problem.key == f"{role}.device_mapping"
    assert problem.line is not None
    assert problem.value in (text, 8)


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
