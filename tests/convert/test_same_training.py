"""A conversion trains what the file asks for: each row names our keys and their right values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert.engine.model import Outcome
from schema.config import check_config
from schema.storage.address import is_remote
from tests.convert.engine.test_unsupported import convert, problems
from tests.convert.files import value_of

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_POLICY, _MESH, _TURNS = "train.train_policy", "policy.parallelism", "rollout.multi_turn_config"
_IMAGES = f"{_POLICY}.dataset.image_column_name"
_SETTINGS = "actor_train.strategy_args.strategy_config"

_SCORE = {f"{_POLICY}.advantage_estimator": "reinforce_plus_plus", f"{_POLICY}.gamma": 1.0}
_RAW_SCORE = _SCORE | {f"{_POLICY}.whiten_advantages": False}
_VEOMNI = {"trainer.n_gpus_per_node": 8, f"{_ACTOR}.strategy": "veomni"}


def _alone(estimator: str, **more: Any) -> dict[str, Any]:
    return {f"{_ROLLOUT}.n": 1, "algorithm.adv_estimator": estimator, **more}


def _loss(mode: str, **keys: Any) -> dict[str, Any]:
    return {f"{_ACTOR}.policy_loss.loss_mode": mode} | {f"{_ACTOR}.{key}": value for key, value in keys.items()}


def _optim(**keys: Any) -> dict[str, Any]:
    return {f"{_ACTOR}.optim.{key}": value for key, value in keys.items()}


def _megatron(**keys: Any) -> dict[str, Any]:
    return {f"{_ACTOR}.strategy": "megatron"} | _optim(**keys)


def _theirs(**keys: Any) -> dict[str, Any]:
    return {f"algorithm.rollout_correction.{key}": value for key, value in keys.items()}


def _ours(**keys: Any) -> dict[str, Any]:
    return {f"{_POLICY}.rollout_correction.{key}": value for key, value in keys.items()}


def _critic(passes: int, batch: int, **keys: Any) -> dict[str, Any]:
    more = {f"critic.{key}": value for key, value in keys.items()}
    return more | {"critic.mu_iterations": passes, "critic.batch_size_per_optimize": batch}


_AVERAGES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")
_OF_SEQUENCES = {f"{_POLICY}.loss_type": "seq-mean-token-mean", f"{_POLICY}.unbiased_loss_max_tokens": None}


SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # columns of images
    ("verl", {"data.image_key": "images"}, {_IMAGES: "images", "validation.dataset.image_column_name": None}),
    ("verl", {"data.image_key": "pictures", "data.val_files": "b.parquet"}, {_IMAGES: "pictures"}),
    (
        "verl",
        {"data.val_files": "b.parquet", "data.image_key": "pictures"},
        {"validation.dataset.image_column_name": "pictures"},
    ),
    ("verl", {"data.image_key": None}, {_IMAGES: None}),
    ("verl sft", {"data.image_key": "pictures"}, {_IMAGES: "pictures"}),
    # templates of prompts
    ("roll", {}, {f"{_TURNS}.enable_thinking": True}),
    ("roll", {"actor_train.data_args.template": "qwen2_5"}, {f"{_TURNS}.enable_thinking": True}),
    ("roll", {"actor_train.data_args.template": "qwen3"}, {f"{_TURNS}.enable_thinking": True}),
    ("roll", {"actor_train.data_args.template": "qwen3_nothink"}, {f"{_TURNS}.enable_thinking": False}),
    (
        "roll",
        {"global_template": "native_nonthinking", "actor_train.data_args.template": "chatml"},
        {f"{_TURNS}.enable_thinking": False},
    ),
    # a clip that bounds nothing below
    (
        "verl",
        _loss("cispo", clip_ratio_low=10, clip_ratio_high=0.2, clip_ratio_c=10.0),
        {f"{_POLICY}.epsilon_low": -1.0, f"{_POLICY}.epsilon_high": 0.2, f"{_POLICY}.lower_bound_ratio": None},
    ),
    ("verl", _loss("vanilla", clip_ratio_low=0.99), {f"{_POLICY}.epsilon_low": 0.99}),
    ("verl", _loss("vanilla", clip_ratio=10), {f"{_POLICY}.epsilon_low": -1.0, f"{_POLICY}.epsilon_high": 10}),
    ("verl", _loss("gpg", clip_ratio=0.3), {f"{_POLICY}.epsilon_low": None, f"{_POLICY}.epsilon_high": None}),
    ("roll", {"use_pg_clip_range": True, "pg_clip_low": 10}, {f"{_POLICY}.epsilon_low": -1.0}),
    # how the loss is averaged: a loss of sequences has its own average
    ("verl", {f"{_ACTOR}.loss_agg_mode": "token-sum"}, {f"{_POLICY}.loss_type": "token-sum"}),
    *(("verl", _loss("gspo", loss_agg_mode=mode, loss_scale_factor=99), _OF_SEQUENCES) for mode in _AVERAGES),
    ("verl", _loss("geo_mean", use_kl_loss=True, loss_agg_mode="seq-mean-token-mean"), _OF_SEQUENCES),
    # ratios of the trainer's policy to the rollout's
    ("verl", _theirs(rollout_is="token"), _ours(weights="token", cap=None)),
    ("verl", _theirs(rollout_is="token", rollout_is_threshold=3.0), _ours(weights="token", cap=3.0)),
    ("verl", _theirs(rollout_is="token", rollout_is_threshold=3.0, bypass_mode=True), _ours(weights=None, cap=None)),
    (
        "verl",
        _theirs(rollout_is="sequence", rollout_is_threshold="0.5_5.0"),
        _ours(weights="sequence", cap=5.0, reject="sequence", reject_below=0.5, reject_above=5.0),
    ),
    (
        "verl",
        _theirs(rollout_rs="token_k1", rollout_rs_threshold="0.5_1.25"),
        _ours(weights=None, reject="token", reject_below=0.8, reject_above=2.0),
    ),
    (
        "verl",
        _theirs(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.25),
        _ours(reject="geometric", reject_below=0.8, reject_above=1.25),
    ),
    # warm-ups
    ("verl", _optim(lr_warmup_steps=0, lr_warmup_steps_ratio=0.1), {"train.optm_warmup_steps": 0}),
    ("verl", _megatron(lr_warmup_steps=0, lr_warmup_steps_ratio=0.1), {"train.optm_warmup_steps": 0.1}),
    ("verl", _megatron(lr_warmup_steps=5, lr_warmup_steps_ratio=0.1), {"train.optm_warmup_steps": 5}),
    (
        "verl",
        _megatron(lr_warmup_steps_ratio=0.1, lr_decay_steps=200, lr_decay_style="linear"),
        {"train.optm_warmup_steps": 20, "train.optm_decay_steps": 180},
    ),
    ("verl", _optim(init_lr_ratio=0.1), {"train.optm_warmup_start_factor": None}),
    ("verl", _optim(init_lr_ratio=0.1, lr_warmup_steps=5), {"train.optm_warmup_start_factor": 0.1}),
    # a critic that the file says nothing of
    (
        "verl",
        {
            "algorithm.adv_estimator": "gae",
            f"{_ACTOR}.ppo_epochs": 3,
            f"{_ACTOR}.ppo_mini_batch_size": 128,
            f"{_ACTOR}.shuffle": True,
            f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        },
        _critic(3, 128, mini_batch_shuffle=True, loss_type="seq-mean-token-mean", epsilon=1e-8),
    ),
    ("verl", {"algorithm.adv_estimator": "gae", f"{_ACTOR}.ppo_epochs": 3, "critic.ppo_epochs": 2}, _critic(2, 256)),
    (
        "roll",
        {"adv_estimator": "gae", "max_grad_norm": 0.5, "critic.training_args.warmup_steps": 8},
        {"critic.batch_size_per_optimize": 128, "critic.optm_warmup_steps": 2, "critic.epsilon": 1e-8},
    ),
    (
        "roll",
        {"adv_estimator": "gae", "critic.training_args.warmup_ratio": 0.1, "critic.training_args.warmup_steps": 0},
        {"critic.optm_warmup_steps": 0.1, "critic.optm_decay_ratio": 0.9},
    ),
    # gradients are clipped at the pipeline's norm
    (
        "roll",
        {"adv_estimator": "gae", "max_grad_norm": 0.5, "actor_train.training_args.max_grad_norm": 0.1},
        {"train.optm_grad_norm_clip": 0.5, "critic.optm_grad_norm_clip": 0.5},
    ),
    # passes of an asynchronous trainer
    (
        "verl",
        {"async_training.require_batches": 1, "rollout.total_epochs": 3, "trainer.total_epochs": 5},
        {"train.epoch": 3},
    ),
    # one sample of each prompt
    *(("verl", _alone(name), _RAW_SCORE) for name in ("grpo", "grpo_vectorized", "rloo", "opo")),
    ("verl", _alone("grpo", **{"algorithm.norm_adv_by_std_in_grpo": False}), _RAW_SCORE),
    ("verl", _alone("reinforce_plus_plus_baseline"), _SCORE | {f"{_POLICY}.whiten_advantages": None}),
    ("verl", _alone("remax"), {f"{_POLICY}.advantage_estimator": "remax"}),
    ("verl", _alone("grpo", **{"algorithm.filter_groups.enable": True}), {f"{_POLICY}.filter_reward_metric": None}),
    # sequences are split over tensor-parallel ranks, if there are any
    ("roll", {f"{_SETTINGS}.sequence_parallel": True}, {f"{_MESH}.sequence_parallel": False}),
    (
        "roll",
        {
            "actor_train.strategy_args.strategy_name": "megatron_train",
            f"{_SETTINGS}.tensor_model_parallel_size": 2,
            f"{_SETTINGS}.sequence_parallel": True,
        },
        {f"{_MESH}.sequence_parallel": True, f"{_MESH}.tp_size": 2},
    ),
    # moving averages
    ("cosmos-rl", {"train.ema_enable": True}, {"train.ema_decay": 0.9999}),
    ("cosmos-rl", {"train.ema_enable": True, "train.ema_decay": 0.99}, {"train.ema_decay": 0.99}),
    ("cosmos-rl", {"train.ema_enable": False, "train.ema_decay": 0.99}, {"train.ema_decay": None}),
    # verl's engines
    (
        "verl",
        _VEOMNI | {f"{_ACTOR}.veomni.ulysses_parallel_size": 2, f"{_ACTOR}.veomni.fsdp_size": 2},
        {f"{_MESH}.cp_size": 2, f"{_MESH}.dp_shard_size": 2, f"{_MESH}.dp_replicate_size": 2},
    ),
    (
        "verl",
        _VEOMNI | {f"{_ACTOR}.veomni.expert_parallel_size": 4, f"{_ACTOR}.veomni.mixed_precision": False},
        {f"{_MESH}.ep_size": 4, f"{_MESH}.dp_shard_size": 8, "train.param_dtype": "float32"},
    ),
    (
        "verl",
        _VEOMNI | {f"{_ACTOR}.optim.{key}": rate for key, rate in (("lr", 1e-6), ("lr_start", 1e-7))},
        {"train.optm_warmup_start_factor": 0.1},
    ),
    (
        "verl sft",
        {"trainer.n_gpus_per_node": 8, "engine.strategy": "megatron", "engine.tensor_model_parallel_size": 4},
        {f"{_MESH}.tp_size": 4, f"{_MESH}.dp_shard_size": 2},
    ),
]


@pytest.mark.parametrize(("system", "keys", "ours"), SAME)
def test_what_is_trained_is_what_the_source_says(system: str, keys: dict[str, Any], ours: dict[str, Any]) -> None:
    found = convert(system, keys)
    assert {key: value_of(found, key) for key in ours} == ours
    assert not found.unsupported
    assert not found.of(Outcome.UNKNOWN)


def test_the_column_of_images_is_said() -> None:
    """The report names the column that is looked at, whatever else it shows."""
    (warning,) = convert("verl", {"data.image_key": "pictures"}).warnings
    assert "pictures" in warning
    assert "validate --data" in warning


SFT = {
    "pretrain": "org/model",
    "sequence_length": 2048,
    "query_key": "input",
    "max_grad_norm": 0.5,
    "eval_steps": 50,
    "track_with": "stdout",
    "validation.data_args.file_name": "held_out.json",
    "validation.data_args.template": "qwen2_5",
    "sft_train.data_args.file_name": "rows.json",
    "sft_train.data_args.template": "qwen2_5",
    "sft_train.training_args.num_train_epochs": 3,
    "sft_train.training_args.per_device_train_batch_size": 2,
    "sft_train.training_args.gradient_accumulation_steps": 4,
    "sft_train.training_args.warmup_steps": 20,
    "sft_train.strategy_args.strategy_name": "megatron_train",
    "sft_train.strategy_args.strategy_config.pipeline_model_parallel_size": 2,
    "sft_train.strategy_args.strategy_config.sequence_parallel": True,
    "sft_train.strategy_args.strategy_config.bias_activation_fusion": True,
    "sft_train.device_mapping": "list(range(0,8))",
    "sft_train.infer_batch_size": 2,
}
OF_SFT = {
    f"{_POLICY}.type": "sft",
    f"{_POLICY}.prompt_column_name": "instruction",
    f"{_POLICY}.query_column_name": "input",
    f"{_POLICY}.response_column_name": "output",
    f"{_POLICY}.dataset.files": ["rows.json"],
    f"{_POLICY}.dataloader_shuffle": False,
    f"{_POLICY}.mini_batch": 8,  # four pieces of two go through the pipeline
    "train.train_batch_per_replica": 32,  # 2 · 4 · 8 / 2
    "train.epoch": 3,
    "train.max_num_steps": None,
    "train.optm_lr": 5e-5,  # ROLL's default
    "train.optm_warmup_steps": 20,  # a step is one optimizer step
    "train.optm_decay_type": "linear",
    "train.optm_grad_norm_clip": 0.5,
    "policy.model_max_length": 2048,
    f"{_MESH}.pp_size": 2,
    f"{_MESH}.dp_shard_size": 4,
    f"{_MESH}.sequence_parallel": False,
    "validation.enable": True,
    "validation.freq": 50,
    "validation.dataset.files": ["held_out.json"],
    "rollout.n_generation": None,
}


def test_supervised_files_of_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "held_out"):
        (tmp_path / f"{name}.json").write_text('[{"instruction": "a", "input": "b", "output": "c"}]')
    found = convert("roll sft", SFT)
    assert {key: value_of(found, key) for key in OF_SFT} == OF_SFT
    assert (found.kind, found.unsupported, list(found.of(Outcome.UNKNOWN))) == ("sft", {}, [])
    assert check_config(found.config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("system_key", "system"),
        ("sft_train.data_args.template", "chatml"),
        ("sft_train.model_args.adapter_name_or_path", "adapter"),
        ("sft_train.strategy_args.strategy_config.moe_aux_loss_coeff", 0.01),
        ("pipeline_cls", "roll.pipeline.rlvr.rlvr_pipeline.RLVRPipeline"),
    ],
)
def test_what_a_supervised_file_of_roll_cannot_ask_for(key: str, value: Any) -> None:
    found = convert("roll sft", {**SFT, key: value})
    assert found.unsupported == {key: value}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("hdfs://host/rows.parquet", "hdfs dfs -get"),
        ("s3://bucket/rows.parquet", "aws s3 cp"),
        ("oss://bucket/rows", "ossutil"),
        ("gs://bucket/rows.jsonl", "gcloud storage"),
        ("abfs://bucket/rows.jsonl", "copy or mount"),
        ("file:///data/rows.jsonl", "write the path: /data/rows.jsonl"),
        ("hf://datasets/owner/rows", "owner/name"),
    ],
)
def test_addresses_are_called_so(name: str, command: str) -> None:
    """Not "does not exist": what is read, and what to do, for data and models alike."""
    found = convert("verl", {"data.train_files": name, "actor_rollout_ref.model.path": name})
    faults = problems(found.config)
    data = f"{_POLICY}.dataset.files"
    assert (data in faults) == (not is_remote(name)), "data is read from some, models from none"
    for key in {data, "policy.model_name_or_path"} & faults.keys():
        assert name in faults[key]
        assert "is an address" in faults[key]
        assert command in faults[key]
