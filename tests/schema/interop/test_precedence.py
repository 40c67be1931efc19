"""Which of two keys counts in the other systems, and what their own defaults and recipes mean here."""

from __future__ import annotations

from typing import Any

import pytest

from schema.interop import convert_text
from schema.interop.keys import lookup, split_key
from schema.interop.model import Conversion, Outcome

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


def ours(found: Conversion, keys: dict[str, Any]) -> dict[str, Any]:
    """What the result has at these keys."""
    return {key: lookup(found.config, split_key(key)) for key in keys}


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
    assert ours(found, {CP: size, SHARD: 8 // size}) == {CP: size, SHARD: 8 // size}
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
    assert ours(found, {DECAY: decay}) == {DECAY: decay}


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
        {
            "placement.nodes": 1,
            "placement.gpus_per_node": 6,
            "rollout.parallelism.n_init_replicas": 2,
            SHARD: 2,
        },
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
    assert ours(found, expected) == expected
    assert ours(found, {f"{POLICY}.on_policy": None}) == {f"{POLICY}.on_policy": None}
    assert not found.of(Outcome.UNKNOWN)


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
    assert ours(found, {BOUND: 4, f"{POLICY}.on_policy": False}) == {BOUND: 4, f"{POLICY}.on_policy": False}


CHUNKED = "rollout.enable_chunked_prefill"
PREFILL = {
    "verl": (verl, "actor_rollout_ref: {rollout: {name: vllm}}", True),
    "verl, written": (verl, "actor_rollout_ref: {rollout: {enable_chunked_prefill: false}}", False),
    "verl without an engine": (verl, "actor_rollout_ref: {rollout: {name: hf}}", None),
    "ROLL": (lambda text: convert_text(text, "run.yaml", "roll"), "rollout_batch_size: 8", True),
}


@pytest.mark.parametrize(("read", "text", "expected"), PREFILL.values(), ids=PREFILL)
def test_the_default_of_chunked_prefill_is_carried(read: Any, text: str, expected: bool | None) -> None:
    assert ours(read(text), {CHUNKED: expected}) == {CHUNKED: expected}
