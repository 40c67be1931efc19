"""Which of two keys counts in the other systems, and what their own defaults and recipes mean here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert import convert_text
from convert.engine.model import Conversion, Outcome
from schema.config import ConfigError, check_config
from schema.config.layout import own_mesh
from schema.config.loading.load import load
from schema.config.loading.tomlwrite import dumps
from schema.config.root import Config
from schema.config.rules.mesh import MESH_RULES
from tests.convert.files import nest, value_of, values_of
from tests.schema.config_samples import GRPO, refused

POLICY = "train.train_policy"
CP, SHARD = "policy.parallelism.cp_size", "policy.parallelism.dp_shard_size"
DECAY = "train.optm_decay_type"
ACTOR = "actor_rollout_ref: {{actor: {{{}}}}}"


def verl(text: str) -> Conversion:
    """The conversion of a small file of verl's RL trainers."""
    return convert_text(f"algorithm: {{adv_estimator: grpo}}\n{text}\n", "run.yaml", "verl")


def sft(text: str) -> Conversion:
    """The conversion of a small file of verl's SFT trainers."""
    return convert_text(f"model: {{partial_pretrain: m}}\n{text}\n", "run.yaml", "verl")


ULYSSES = "ulysses_sequence_parallel_size"
ULYSSES_SIZES = {
    "the role's, above the engine's": (f"{ULYSSES}: 2, fsdp_config: {{{ULYSSES}: 4}}", 2),
    "the role's, though it stands below": (f"fsdp_config: {{{ULYSSES}: 1}}, {ULYSSES}: 2", 2),
    "the engine's, where the role's is 1": (f"{ULYSSES}: 1, fsdp_config: {{{ULYSSES}: 4}}", 4),
    "the engine's alone": (f"fsdp_config: {{{ULYSSES}: 4}}", 4),
    "the engine's by its newer name": (f"fsdp: {{{ULYSSES}: 4}}", 4),
}


@pytest.mark.parametrize(("actor", "size"), ULYSSES_SIZES.values(), ids=ULYSSES_SIZES)
def test_the_sequence_parallel_size_of_the_role_counts_before_the_engines(actor: str, size: int) -> None:
    found = verl(ACTOR.format(actor))
    assert values_of(found, {CP: size, SHARD: 8 // size}) == {CP: size, SHARD: 8 // size}
    assert not found.of(Outcome.UNKNOWN)
    assert not any(CP in warning for warning in found.warnings)


SCHEDULES = {
    "warmup_style over what newer files inherit": (
        verl,
        ACTOR.format("optim: {lr_scheduler_type: constant, warmup_style: cosine}"),
        "cosine",
    ),
    "a warmup_style of null says nothing": (
        verl,
        ACTOR.format("optim: {warmup_style: null, lr_scheduler_type: cosine}"),
        "cosine",
    ),
    "warmup_style alone": (verl, ACTOR.format("optim: {warmup_style: cosine}"), "cosine"),
    "SFT's lr_scheduler over an inherited type": (
        sft,
        "optim: {lr_scheduler_type: constant, lr_scheduler: wsd}",
        "wsd",
    ),
    "SFT's lr_scheduler over warmup_style": (
        sft,
        "optim: {warmup_style: constant, lr_scheduler: cosine, lr_scheduler_type: constant}",
        "cosine",
    ),
    "SFT's inherited type alone": (sft, "optim: {lr_scheduler_type: constant}", None),
}


@pytest.mark.parametrize(("read", "text", "decay"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_schedule_that_the_trainer_reads_counts(read: Any, text: str, decay: str | None) -> None:
    found = read(text)
    assert values_of(found, {DECAY: decay}) == {DECAY: decay}


SEPARATE = "actor_rollout_ref: {hybrid_engine: false, actor: {ppo_mini_batch_size: 32}, rollout: {n: 8}}\n"
STREAMED = SEPARATE + "data: {train_batch_size: 0, gen_batch_size: 1, val_files: v.parquet}\n"
BOUND, INTERVAL = f"{POLICY}.allowed_outdated_steps", "train.sync_weight_interval"
RECIPES = {
    "fully_async by its defaults": (
        STREAMED + "async_training: {partial_rollout: true}",
        {BOUND: 4, INTERVAL: 4, "weight_sync.update_mode": "recompute"},
    ),
    "without staleness: the least that the interval allows": (
        STREAMED + "async_training: {staleness_threshold: 0, trigger_parameter_sync_step: 4}",
        {BOUND: 3, INTERVAL: 4},
    ),
    "one version ahead is one step off": (
        STREAMED + "async_training: {staleness_threshold: 1, trigger_parameter_sync_step: 1}",
        {BOUND: 1, INTERVAL: 1},
    ),
    "a share of a window is rounded up": (
        STREAMED + "async_training: {staleness_threshold: 0.3, trigger_parameter_sync_step: 5}",
        {BOUND: 6, INTERVAL: 5},
    ),
    "a step is what the trainer fetches": (
        STREAMED + "async_training: {trigger_parameter_sync_step: 4, require_batches: 2}",
        {"train.train_batch_per_replica": 512, f"{POLICY}.batch_size_per_optimize": 256},
    ),
    "one mini-batch is the whole step": (
        STREAMED + "async_training: {trigger_parameter_sync_step: 4, require_batches: 1}",
        {"train.train_batch_per_replica": 256, f"{POLICY}.batch_size_per_optimize": None},
    ),
    "what it counts in versions and prompts": (
        STREAMED
        + "async_training: {trigger_parameter_sync_step: 4}\ntrainer: {save_freq: 10, total_training_steps: 7}\n"
        + "rollout: {total_rollout_steps: 3200, test_freq: 5}",
        {"train.max_num_steps": 100, "train.ckpt.save_freq": 40, "validation.freq": 20},
    ),
    "GPUs of both on two machines": (
        STREAMED + "async_training: {require_batches: 1}\nrollout: {nnodes: 2, n_gpus_per_node: 8}\n"
        "trainer: {nnodes: 4, n_gpus_per_node: 8}",
        {
            "placement.nodes": 6,
            "placement.gpus_per_node": 8,
            "placement.share": "none",
            "rollout.parallelism.n_init_replicas": 8,
            SHARD: 32,
        },
    ),
    "GPUs of both on one": (
        STREAMED + "async_training: {require_batches: 1}\nrollout: {nnodes: 1, n_gpus_per_node: 4}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 2}",
        {"placement.nodes": 1, "placement.gpus_per_node": 6, "rollout.parallelism.n_init_replicas": 2, SHARD: 2},
    ),
    "one_step_off": (
        SEPARATE + "data: {train_batch_size: 64}\nrollout: {nnodes: 1, n_gpus_per_node: 6}\n"
        "trainer: {n_gpus_per_node: 2}",
        {
            BOUND: 1,
            INTERVAL: None,
            "train.train_batch_per_replica": 512,
            "placement.share": "none",
            "placement.gpus_per_node": 8,
            "rollout.parallelism.n_init_replicas": 3,
        },
    ),
}


@pytest.mark.parametrize(("text", "expected"), RECIPES.values(), ids=RECIPES)
def test_files_of_the_asynchronous_recipes_are_asynchronous(text: str, expected: dict[str, Any]) -> None:
    found = verl(text)
    assert values_of(found, expected) == expected
    assert values_of(found, {f"{POLICY}.on_policy": None}) == {f"{POLICY}.on_policy": None}
    assert not found.of(Outcome.UNKNOWN)


def test_the_machines_of_a_job_are_those_of_trainer_and_rollouts() -> None:
    found = verl(
        "trainer: {nnodes: 1, n_gpus_per_node: 8, v1: {trainer_mode: separate_async}}\n"
        "actor_rollout_ref: {rollout: {nnodes: 2, n_gpus_per_node: 8, tensor_model_parallel_size: 4}}"
    )
    expected = {"placement.nodes": 3, "placement.gpus_per_node": 8, "rollout.parallelism.n_init_replicas": 4}
    assert values_of(found, expected) == expected


def test_a_file_of_the_recipe_as_published_is_understood() -> None:
    text = """
actor_rollout_ref:
  checkpoint_engine: ${oc.select:async_training.checkpoint_engine, null}
  actor: {use_rollout_log_probs: "${oc.select:async_training.use_rollout_log_probs, True}"}
async_training:
  staleness_threshold: 0.1
  trigger_parameter_sync_step: 4
  require_batches: 1
  partial_rollout: True
  use_rollout_log_probs: True
  compute_prox_log_prob: False
  use_trainer_do_validate: False
  checkpoint_engine: {enable: True, device_buffer_size_M: 4096, overlap_broadcast_and_consume: False}
  compute_advantage_in_rollout: False
rollout: {nnodes: 1, n_gpus_per_node: 8, total_rollout_steps: 100, test_freq: 1}
data: {gen_batch_size: 1}
trainer: {v1: {trainer_mode: sync, sampler: {max_off_policy_threshold: 8}}}
"""
    found = verl(text)
    assert not found.of(Outcome.UNKNOWN)
    assert values_of(found, {BOUND: 4, f"{POLICY}.on_policy": False}) == {BOUND: 4, f"{POLICY}.on_policy": False}


CHUNKED = "rollout.enable_chunked_prefill"
PREFILL = {
    "verl": (verl, "actor_rollout_ref: {rollout: {name: vllm}}", True),
    "verl, written": (verl, "actor_rollout_ref: {rollout: {enable_chunked_prefill: false}}", False),
    "verl without an engine": (verl, "actor_rollout_ref: {rollout: {name: hf}}", None),
    "ROLL": (lambda text: convert_text(text, "run.yaml", "roll"), "rollout_batch_size: 8", True),
}


@pytest.mark.parametrize(("read", "text", "expected"), PREFILL.values(), ids=PREFILL)
def test_the_default_of_chunked_prefill_is_carried(read: Any, text: str, expected: bool | None) -> None:
    assert values_of(read(text), {CHUNKED: expected}) == {CHUNKED: expected}


# --- cosmos-rl ------------------------------------------------------------------------------------------------

TRAINED, SAMPLED = f"{POLICY}.temperature", "rollout.sampling_config.temperature"
LOW, HIGH, PIECE = f"{POLICY}.epsilon_low", f"{POLICY}.epsilon_high", f"{POLICY}.batch_size_per_optimize"
RANKS = {"policy.parallelism.dp_shard_size": 4, "policy.parallelism.dp_replicate_size": 2}


def cosmos(keys: dict[str, Any]) -> Conversion:
    """The conversion of a small file of cosmos-rl."""
    base = {"policy.model_name_or_path": "org/model", f"{POLICY}.type": "grpo"}
    return convert_text(dumps(nest({**base, **keys})), "run.toml", "cosmos-rl")


COSMOS = {
    "the trainer's temperature never samples": ({TRAINED: 0.7}, {TRAINED: None, SAMPLED: None}, True),
    "where they differ the one that samples counts": (
        {TRAINED: 0.7, SAMPLED: 0.9},
        {TRAINED: None, SAMPLED: 0.9},
        True,
    ),
    "what samples alone, and the trainer's default": ({SAMPLED: 0.9}, {TRAINED: None, SAMPLED: 0.9}, True),
    "one temperature": ({TRAINED: 0.9, SAMPLED: 0.9}, {TRAINED: 0.9, SAMPLED: 0.9}, False),
    "a temperature of 0 divides nothing": ({TRAINED: 0.0}, {TRAINED: 1.0}, False),
    "a piece of the batch is of one rank": ({PIECE: 4, **RANKS}, {PIECE: 32}, False),
    "ranks that are open": ({PIECE: 4, "policy.parallelism.dp_shard_size": -1}, {PIECE: 4}, True),
    "no clip on either side": ({LOW: -1, HIGH: -1.0}, {LOW: -1, HIGH: -1.0}, False),
}


@pytest.mark.parametrize(("keys", "expected", "is_warned"), COSMOS.values(), ids=COSMOS)
def test_keys_of_cosmos_rl_that_mean_something_else(
    keys: dict[str, Any], expected: dict[str, Any], is_warned: bool
) -> None:
    found = cosmos(keys)
    assert values_of(found, expected) == expected
    assert bool(found.warnings) is is_warned


@pytest.mark.parametrize(("steps", "differs"), [(20, True), (0.1, True), (0, False)])
def test_a_warm_up_of_cosmos_rl_says_that_its_first_steps_differ(steps: float, differs: bool) -> None:
    entry = cosmos({"train.optm_warmup_steps": steps}).entry("train.optm_warmup_steps")
    assert ("(t + 1)/W" in entry.note) is differs


DIRECT = {
    "the port": ("12800", []),
    "nothing": ("", []),
    "the port, with a key of ours set": ("12800", ["redis.key_prefix=mine"]),
}


@pytest.mark.parametrize(("redis", "set_"), DIRECT.values(), ids=DIRECT)
def test_the_port_of_a_file_of_cosmos_rl_is_a_warning(redis: str, set_: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dumps({"redis": redis, **GRPO}))
    found = load(file, set_)
    (warning,) = found.warnings
    assert (warning.key, warning.line) == ("redis", 1)
    assert found.config.redis.url == ""
    assert found.config.redis.key_prefix == ("mine" if set_ else "cosmos")
    assert check_config({"redis": redis, **GRPO}).redis.url == ""


def test_another_text_for_redis_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dumps({"redis": "redis://elsewhere:6379", **GRPO}))
    with pytest.raises(ConfigError, match="redis"):
        load(file)


# --- ROLL -----------------------------------------------------------------------------------------------------


def roll(text: str) -> Conversion:
    """The conversion of a small file of ROLL."""
    return convert_text(f"rollout_batch_size: 64\n{text}\n", "run.yaml", "roll")


DOMAINS = {
    "the last one gets what is left": ("{math: 0.5, code: 0.4}", {"math": 0.5, "code": 0.5}, True),
    "the last one loses what is too much": ("{a: 0.5, b: 0.3, c: 0.3}", {"a": 0.5, "b": 0.3, "c": 0.2}, True),
    "they add up": ("{math: 0.7, code: 0.3}", {"math": 0.7, "code": 0.3}, False),
    "they add up but for the last digit": ("{a: 0.3333333, b: 0.6666666}", {"a": 0.3333333, "b": 0.6666666}, False),
}


@pytest.mark.parametrize(("shares", "expected", "is_warned"), DOMAINS.values(), ids=DOMAINS)
def test_shares_of_domains_are_those_that_roll_deals(
    shares: str, expected: dict[str, float], is_warned: bool
) -> None:
    found = roll(f"actor_train: {{data_args: {{domain_interleave_probs: {shares}}}}}")
    assert value_of(found, f"{POLICY}.domain_shares") == expected
    assert any("do not add up" in warning for warning in found.warnings) is is_warned


def test_a_last_domain_without_anything_left_is_not_understood() -> None:
    found = roll("actor_train: {data_args: {domain_interleave_probs: {math: 0.6, code: 0.5, chat: 0.1}}}")
    assert "leave nothing for chat" in found.entry("actor_train.data_args.domain_interleave_probs.chat").note


FROZEN = "model_args: {freeze_module_prefix: 'vision_model, lm_head'}"


def test_frozen_modules_are_named() -> None:
    found = roll(f"actor_train: {{{FROZEN}}}\nactor_infer: {{{FROZEN}}}\nreference: {{{FROZEN}}}")
    assert not found.of(Outcome.UNKNOWN)
    assert found.config["policy"]["trainable_map"] == {"vision_model": False, "lm_head": False}
    assert any("freeze_module_prefix" in warning and "vision_model" in warning for warning in found.warnings)


# --- files that leave the rest to others ----------------------------------------------------------------------

HYDRA = {
    "a base and a group": (
        verl,
        "defaults:\n  - ppo_trainer\n  - actor@actor_rollout_ref.actor: dp_actor\n  - _self_\n",
        ["not read", "ppo_trainer", "actor@actor_rollout_ref.actor: dp_actor", "--cfg job --resolve"],
    ),
    "ROLL's": (roll, "defaults: [../config/envs@_here_, _self_]", ["not read", "../config/envs@_here_"]),
}


@pytest.mark.parametrize(("read", "text", "words"), HYDRA.values(), ids=HYDRA)
def test_what_hydra_would_compose_is_named(read: Any, text: str, words: list[str]) -> None:
    found = read(text)
    (warning,) = [warning for warning in found.warnings if "`defaults`" in warning]
    assert all(word in warning for word in words), warning
    assert "_self_" not in warning
    assert found.entry("defaults").outcome is Outcome.NONE


DEFAULTS = "defaults: [../config/deepspeed_zero3@_here_, _self_]\n"


@pytest.mark.parametrize(
    ("text", "system", "words"),
    [
        (DEFAULTS + "rollout_batch_size: 8\nseed: ${zero3}", None, "write their keys into this file"),
        (DEFAULTS + "data: {train_batch_size: 64}", None, "--cfg job --resolve"),
        (DEFAULTS + "data: {train_batch_size: 64}", "verl", "--cfg job --resolve"),
    ],
    ids=["a reference", "keys of no system", "no key of the system"],
)
def test_a_file_that_hydra_would_complete_is_refused_with_what_is_missing(
    text: str, system: str | None, words: str
) -> None:
    (problem,) = refused(convert_text, text, "run.yaml", system)
    assert "files that are not read: ../config/deepspeed_zero3@_here_; " in problem.hint
    assert words in problem.hint


def test_a_file_that_composes_nothing_says_nothing_of_hydra() -> None:
    found = verl("defaults: [_self_]")
    assert not any("`defaults`" in warning for warning in found.warnings)


_VERL = "actor_rollout_ref: {{actor: {{use_kl_loss: true, {}}}, ref: {{{}}}}}"
_MEGATRON = "strategy: megatron, megatron: {{{}}}"
_TP2, _TP4 = "tensor_model_parallel_size: 2", "tensor_model_parallel_size: 4"
_PP2 = "pipeline_model_parallel_size: 2"
_ROLL = (
    "use_kl_loss: true\nkl_loss_coef: 0.1\n"
    "actor_train: {{strategy_args: {{strategy_name: megatron_train, strategy_config: {{{}}}}}, "
    "device_mapping: 'list(range(0,8))'}}\nreference: {{strategy_args: {{strategy_name: megatron_infer, "
    "strategy_config: {{{}}}}}{}}}"
)
_DEVICES = ", device_mapping: 'list(range(0,8))'"
_WHOLE = {"tp_size": 4, "dp_shard_size": 2}
MESHES: list[tuple[Any, str, dict[str, Any] | None]] = [
    (verl, _VERL.format(_MEGATRON.format(_TP2), _MEGATRON.format(_TP4)), _WHOLE),
    (verl, _VERL.format(_MEGATRON.format(_TP4), _MEGATRON.format(_TP4)), None),
    (verl, _VERL.format(f"{ULYSSES}: 2", f"{ULYSSES}: 4"), {"cp_size": 4, "tp_size": 1, "dp_shard_size": 2}),
    # a key that alone would leave the sizes to our defaults
    (verl, _VERL.format(*[_MEGATRON.format(f"{_PP2}, virtual_pipeline_model_parallel_size: 2")] * 2), None),
    (verl, _VERL.format(*[_MEGATRON.format(f"{_TP4}, sequence_parallel: true")] * 2), None),
    # with adapters the reference model is the policy
    (verl, _VERL.format(f"{ULYSSES}: 2", f"{ULYSSES}: 4}}, model: {{lora_rank: 8"), None),
    (roll, _ROLL.format(_TP2, _TP4, _DEVICES), _WHOLE),
    (roll, _ROLL.format(_TP2, _TP4, ""), _WHOLE),
    (roll, _ROLL.format(_TP2, _TP2, ""), None),
]


@pytest.mark.parametrize(("read", "text", "expected"), MESHES)
def test_a_reference_has_a_whole_mesh_of_its_own_where_it_is_another(
    read: Any, text: str, expected: dict[str, Any] | None
) -> None:
    found = read(text).config
    mesh = found.get("reference", {}).get("parallelism")
    assert (mesh and {name: mesh[name] for name in expected or {}}) == expected
    config = Config.model_validate({key: value for key, value in found.items() if key != "unsupported"})
    assert (own_mesh(config, "reference") is None) == (expected is None)
    assert [problem for rule in MESH_RULES for problem in rule(config)] == []


@pytest.mark.parametrize(("size", "expected"), [(_TP2, None), (_TP4, False)])
def test_a_critic_of_roll_splits_sequences_in_a_mesh_of_its_own(size: str, expected: bool | None) -> None:
    text = _ROLL.format(_TP2, f"{size}, sequence_parallel: false", "")
    found = roll("adv_estimator: gae\n" + text.replace("reference", "critic").replace("_infer", "_train"))
    assert value_of(found, "critic.parallelism.sequence_parallel") is expected
    assert (value_of(found, "critic.parallelism") is None) == (expected is None)
