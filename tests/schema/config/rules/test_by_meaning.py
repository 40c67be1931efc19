"""Every rule between keys, fault by fault: who is blamed, that the message names keys and values, that the remedy
works (`tests.schema.remedies`), and what stands next to each fault and is sound.
"""

from __future__ import annotations

from typing import Any

import pytest

from schema.config import Config
from schema.config.rules import RULES, WARNINGS, algorithm, batch, mesh, role, timing, training
from schema.config.rules import checkpoint as ckpt
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import Case, check_case, written
from tests.support.each import check_each

P = "train.train_policy"
CRITIC = {"critic.enable": True, f"{P}.advantage_estimator": "gae"}
VLLM = {"rollout.backend": "vllm"}
ALONE = {"rollout.n_generation": 1, "rollout.max_concurrent_samples": 8}
ADAPTER = {"policy.lora.r": 4}


BATCH = [
    Case(
        batch.batch_is_whole_groups,
        {"train.train_batch_per_replica": 20},
        "train.train_batch_per_replica",
        ("20 samples", "rollout.n_generation = 16"),
    ),
    Case(
        batch.batch_is_whole_groups,
        {"train.train_batch_per_replica": 2**20 - 1},
        "train.train_batch_per_replica",
    ),
    Case(
        batch.optimizer_steps_divide_batch,
        {f"{P}.batch_size_per_optimize": 5},
        f"{P}.batch_size_per_optimize",
        ("train.train_batch_per_replica = 16", "5 samples"),
    ),
    Case(
        batch.optimizer_steps_divide_batch,
        CRITIC | {"critic.batch_size_per_optimize": 10**30},
        "critic.batch_size_per_optimize",
        ("train.train_batch_per_replica = 16",),
    ),
    Case(
        batch.shuffling_has_pieces,
        {f"{P}.mini_batch_shuffle": True},
        f"{P}.mini_batch_shuffle",
        (f"{P}.mu_iterations = 1", f"{P}.batch_size_per_optimize (unset)", "train_batch_per_replica = 16"),
    ),
    Case(
        batch.shuffling_has_pieces,
        CRITIC | {"critic.mini_batch_shuffle": True, "critic.batch_size_per_optimize": 16},
        "critic.mini_batch_shuffle",
        ("critic.mu_iterations = 1", "(16)"),
    ),
    Case(
        batch.shuffling_has_pieces,
        {f"{P}.mini_batch_shuffle_seed": 7},
        f"{P}.mini_batch_shuffle_seed",
        (f"{P}.mini_batch_shuffle = false",),
    ),
]

TIMING = [
    Case(
        timing.on_policy_agrees,
        {f"{P}.on_policy": True, f"{P}.allowed_outdated_steps": 2},
        f"{P}.on_policy",
        ("on_policy = true", "allowed_outdated_steps = 2"),
    ),
    Case(
        timing.interval_fits_staleness,
        {"train.sync_weight_interval": 9},
        "train.sync_weight_interval",
        ("every 9 steps", "at least 8", "is 4"),
    ),
    Case(
        timing.interval_fits_staleness,
        {"train.sync_weight_interval": 2, f"{P}.on_policy": True},
        "train.sync_weight_interval",
        ("every 2 steps",),
    ),
    Case(
        timing.stragglers_are_bounded,
        {"controller.on_stale": "drop"},
        "controller.on_stale",
        ("controller.straggler_timeout",),
    ),
    Case(
        timing.stragglers_are_bounded,
        {"controller.straggler_timeout": 5.0},
        "controller.straggler_timeout",
        ('controller.on_stale = "wait"',),
    ),
    Case(
        timing.timeouts_are_ordered,
        {"controller.lease_timeout": 1.0},
        "controller.lease_timeout",
        ("1.0 s", "controller.heartbeat_interval"),
    ),
    Case(
        timing.timeouts_are_ordered,
        {"launcher.restart_backoff": 99.0},
        "launcher.restart_backoff_max",
        ("launcher.restart_backoff = 99.0",),
    ),
]

LOSS = [
    Case(
        algorithm.averages_agree,
        {f"{P}.unbiased_loss_max_tokens": 100},
        f"{P}.unbiased_loss_max_tokens",
        ("100", f'{P}.loss_type = "seq-mean-token-mean"', '"token-mean"'),
    ),
    Case(
        algorithm.averages_agree,
        {f"{P}.variant": "gspo", f"{P}.loss_type": "seq-mean-token-sum"},
        f"{P}.loss_type",
        (f'{P}.variant = "gspo"', '"seq-mean-token-sum"'),
    ),
    *(
        Case(
            algorithm.clips_belong_to_their_loss,
            {f"{P}.variant": variant, f"{P}.lower_bound_ratio": 4.0},
            f"{P}.lower_bound_ratio",
            ("4.0", f"{P}.variant = {variant}"),
        )
        for variant in ("gspo", "cispo", "reinforce")
    ),
    Case(
        algorithm.clips_belong_to_their_loss,
        {f"{P}.variant": "reinforce", f"{P}.epsilon_high": 0.28},
        f"{P}.epsilon_high",
        ("0.28", f"{P}.variant = reinforce"),
    ),
    Case(
        algorithm.clips_belong_to_their_loss,
        {f"{P}.aipo_rho": 4.0, f"{P}.epsilon_low": 0.1},
        f"{P}.epsilon_low",
        ("0.1", f"{P}.aipo_rho = 4.0"),
    ),
    *(
        Case(
            algorithm.truncation_fits_the_loss,
            {f"{P}.aipo_rho": 4.0, f"{P}.variant": variant},
            f"{P}.aipo_rho",
            ("4.0", f'{P}.variant = "{variant}"'),
        )
        for variant in ("gspo", "cispo", "reinforce", "mine.py:loss")
    ),
    Case(
        algorithm.decoupling_is_on,
        {f"{P}.behav_imp_weight_cap": 5.0},
        f"{P}.behav_imp_weight_cap",
        ("5.0", f"{P}.use_decoupled_loss = false"),
    ),
    Case(
        algorithm.decoupling_is_on,
        {f"{P}.use_decoupled_loss": True, f"{P}.rollout_correction.weights": "token"},
        f"{P}.rollout_correction.weights",
        ('"token"', f"{P}.use_decoupled_loss = true"),
    ),
    Case(
        algorithm.correction_is_complete,
        {f"{P}.rollout_correction.reject": "token"},
        f"{P}.rollout_correction.reject",
        ('"token"', f"{P}.rollout_correction.reject_below", f"{P}.rollout_correction.reject_above"),
    ),
    Case(
        algorithm.correction_is_complete,
        {f"{P}.rollout_correction.reject_above": 2.0},
        f"{P}.rollout_correction.reject_above",
        ("2.0", f'{P}.rollout_correction.reject = "none"'),
    ),
    Case(
        algorithm.correction_is_complete,
        {
            f"{P}.rollout_correction.reject": "geometric",
            f"{P}.rollout_correction.reject_below": 2.0,
            f"{P}.rollout_correction.reject_above": 0.5,
        },
        f"{P}.rollout_correction.reject_below",
        ("2.0", f"{P}.rollout_correction.reject_above = 0.5"),
    ),
    Case(
        algorithm.correction_is_complete,
        {f"{P}.rollout_correction.cap": 3.0},
        f"{P}.rollout_correction.cap",
        ("3.0", f'{P}.rollout_correction.weights = "none"'),
    ),
]

ESTIMATOR = [
    Case(
        algorithm.critic_agrees,
        {f"{P}.advantage_estimator": "gae"},
        f"{P}.advantage_estimator",
        ('"gae"', "critic.enable = false"),
    ),
    Case(
        algorithm.critic_agrees,
        {"critic.enable": True, f"{P}.advantage_estimator": "rloo"},
        "critic.enable",
        (f'{P}.advantage_estimator = "rloo"',),
    ),
    Case(algorithm.critic_agrees, {"critic.enable": True}, "critic.enable", (f'{P}.type = "sft"',), SFT),
    Case(
        algorithm.critic_warms_up_in_time,
        CRITIC | {"critic.warmup_steps": 30, "train.max_num_steps": 20},
        "critic.warmup_steps",
        ("30 steps", "train.max_num_steps = 20"),
    ),
    *(
        Case(
            algorithm.groups_are_large_enough,
            ALONE | {f"{P}.advantage_estimator": name},
            "rollout.n_generation",
            (f'{P}.advantage_estimator = "{name}"', "rollout.n_generation = 1"),
        )
        for name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k")
    ),
    Case(
        algorithm.groups_are_large_enough,
        ALONE | {f"{P}.advantage_estimator": "remax", f"{P}.filter_reward_metric": "boxed_math"},
        f"{P}.filter_reward_metric",
        ("boxed_math", "rollout.n_generation = 1"),
    ),
    Case(
        algorithm.groups_are_large_enough,
        ALONE | {f"{P}.advantage_estimator": "remax", f"{P}.min_filter_prefix_tokens": 8},
        f"{P}.min_filter_prefix_tokens",
        ("8", "rollout.n_generation = 1"),
    ),
    *(
        Case(
            algorithm.options_belong_to_their_estimator,
            {f"{P}.{key}": value, f"{P}.advantage_estimator": name},
            f"{P}.{key}",
            (f'{P}.advantage_estimator = "{name}"',),
        )
        for key, value, name in (
            ("gamma", 0.9, "grpo"),
            ("gae_lambda", 0.9, "reinforce_plus_plus"),
            ("unbiased_advantage", True, "rloo"),
        )
    ),
]

KL = [
    Case(algorithm.loss_term_is_on, {f"{P}.kl_type": "k1"}, f"{P}.kl_type", ('"k1"', f"{P}.kl_beta = 0.0")),
    Case(
        algorithm.loss_term_is_on,
        {f"{P}.unbiased_kl_estimate": True, f"{P}.kl_in_reward.beta": 0.1},
        f"{P}.unbiased_kl_estimate",
        (f"{P}.kl_beta = 0.0",),
    ),
    Case(
        algorithm.reference_is_used,
        {f"{P}.reference_reset_interval": 50},
        f"{P}.reference_reset_interval",
        ("50", f"{P}.kl_beta = 0.0", f"{P}.kl_in_reward.beta = 0.0"),
    ),
    Case(
        algorithm.reference_is_used,
        {"reference.model_name_or_path": "owner/name"},
        "reference.model_name_or_path",
        (f"{P}.kl_beta = 0.0",),
    ),
    Case(
        algorithm.reference_is_used,
        {"reference.parallelism.tp_size": 1},
        "reference.parallelism",
        (f"{P}.kl_beta = 0.0",),
    ),
    Case(
        algorithm.reference_is_used,
        {"reference.offload": True},
        "reference.offload",
        (f'{P}.type = "sft"',),
        SFT,
    ),
    Case(
        algorithm.resets_agree,
        {f"{P}.reset_optimizer_with_reference": False},
        f"{P}.reset_optimizer_with_reference",
        (f"{P}.reference_reset_interval is unset",),
    ),
    Case(
        algorithm.reward_term_is_complete,
        {f"{P}.kl_in_reward.type": "k2"},
        f"{P}.kl_in_reward.type",
        ('"k2"', f"{P}.kl_in_reward.beta = 0.0"),
    ),
    Case(
        algorithm.reward_term_is_complete,
        {f"{P}.kl_in_reward.controller": "adaptive"},
        f"{P}.kl_in_reward.controller",
        ('"adaptive"', f"{P}.kl_in_reward.beta = 0.0"),
    ),
    Case(
        algorithm.reward_term_is_complete,
        {f"{P}.kl_in_reward.beta": 0.1, f"{P}.kl_in_reward.horizon": 100},
        f"{P}.kl_in_reward.horizon",
        ("100", f'{P}.kl_in_reward.controller = "fixed"'),
    ),
    Case(
        algorithm.reward_term_is_complete,
        {f"{P}.kl_in_reward.beta": 0.1, f"{P}.kl_in_reward.target": 0.5},
        f"{P}.kl_in_reward.target",
        ("0.5", f'{P}.kl_in_reward.controller = "fixed"'),
    ),
]

LENGTH = [
    *(
        Case(
            batch.longest_sample_fits,
            extra | {f"{section}.max_token_len_per_mini_batch": 100},
            f"{section}.max_token_len_per_mini_batch",
            ("policy.model_max_length = 4096", "micro-batch of 100"),
        )
        for section, extra in ((P, {}), (f"{P}.old_log_prob", {}), ("reference", {}), ("critic", CRITIC))
    ),
    Case(
        batch.responses_leave_room,
        {"rollout.max_response_length": 4096},
        "rollout.max_response_length",
        ("4096 tokens", "policy.model_max_length = 4096"),
    ),
    Case(
        batch.responses_leave_room,
        {"rollout.max_model_len": 1024},
        "rollout.max_response_length",
        ("2048 tokens", "rollout.max_model_len = 1024"),
    ),
    Case(
        batch.overlong_buffer_fits,
        {f"{P}.overlong_reward.enable_overlong_penalty": True},
        f"{P}.overlong_reward.buffer_length",
        ("4096", "rollout.max_response_length = 2048"),
    ),
    Case(
        batch.engine_steps_hold_enough,
        VLLM | {"rollout.max_num_batched_tokens": 100},
        "rollout.max_num_batched_tokens",
        ("100 tokens", "policy.model_max_length = 4096", "rollout.enable_chunked_prefill = false"),
    ),
    Case(
        batch.engine_steps_hold_enough,
        VLLM | {"rollout.max_num_batched_tokens": 100, "rollout.max_model_len": 3000},
        "rollout.max_num_batched_tokens",
        ("rollout.max_model_len = 3000",),
    ),
    Case(
        batch.engine_steps_hold_enough,
        VLLM
        | {
            "rollout.max_num_batched_tokens": 100,
            "rollout.enable_chunked_prefill": True,
            "rollout.max_num_seqs": 128,
        },
        "rollout.max_num_batched_tokens",
        ("100 tokens", "rollout.max_num_seqs = 128"),
    ),
]


def of_both(rule: Any, values: dict[str, Any], key: str, words: tuple[str, ...]) -> list[Case]:
    """The same fault in the policy's optimizer and in the critic's."""
    cases = []
    for section, extra in (("train", {}), ("critic", CRITIC)):
        mine = {(f"{section}.{name}" if "." not in name else name): value for name, value in values.items()}
        cases.append(
            Case(rule, extra | mine, f"{section}.{key}", tuple(w.replace("@", section) for w in words))
        )
    return cases


SCHEDULE = [
    *of_both(
        training.warmup_is_a_share_or_steps,
        {"optm_warmup_steps": 20.0},
        "optm_warmup_steps",
        ("20.0", "at most 1.0"),
    ),
    *of_both(
        training.warmup_is_a_share_or_steps,
        {"optm_warmup_steps": 0.7, "optm_decay_ratio": 0.6, "optm_decay_type": "linear"},
        "optm_decay_ratio",
        ("0.6", "@.optm_warmup_steps = 0.7"),
    ),
    *of_both(
        training.decay_is_complete,
        {"optm_decay_ratio": 0.5, "optm_decay_steps": 10, "optm_decay_type": "linear"},
        "optm_decay_steps",
        ("10", "@.optm_decay_ratio = 0.5"),
    ),
    *of_both(
        training.decay_is_complete,
        {"optm_decay_type": "cosine"},
        "optm_decay_type",
        ("cosine", "@.optm_decay_ratio"),
    ),
    *of_both(
        training.decay_is_complete, {"optm_decay_steps": 10}, "optm_decay_steps", ("@.optm_decay_type",)
    ),
    *of_both(
        training.decay_is_complete,
        {"optm_decay_ratio": 0.5, "optm_decay_type": "inverse_sqrt"},
        "optm_decay_ratio",
        ('@.optm_decay_type = "inverse_sqrt"',),
    ),
    *of_both(
        training.decay_is_complete, {"optm_min_lr_factor": 0.1}, "optm_min_lr_factor", ("@.optm_decay_type",)
    ),
    *of_both(
        training.decay_fits_the_run,
        {"optm_decay_steps": 90, "optm_decay_type": "linear", "train.max_num_steps": 100},
        "optm_decay_steps",
        ("90", "@.optm_warmup_steps = 20", "train.max_num_steps = 100"),
    ),
    *of_both(
        training.decay_fits_the_run,
        {"optm_decay_steps": 5, "optm_decay_type": "linear", "train.max_num_steps": 10},
        "optm_decay_steps",
        ("train.max_num_steps = 10",),
    ),
    *of_both(
        training.options_belong_to_their_shape,
        {"optm_wsd_decay_type": "linear"},
        "optm_wsd_decay_type",
        ('"linear"', '@.optm_decay_type = "none"'),
    ),
    *of_both(
        training.options_belong_to_their_shape,
        {"optm_num_cycles": 2.0, "optm_decay_type": "linear"},
        "optm_num_cycles",
        ("2.0", '@.optm_decay_type = "linear"'),
    ),
    *of_both(
        training.weight_decay_ramp_agrees,
        {"optm_weight_decay_start": 0.1},
        "optm_weight_decay_start",
        ("0.1", '@.optm_weight_decay_ramp = "constant"'),
    ),
    *of_both(
        training.weight_decay_ramp_agrees,
        {"optm_weight_decay_ramp": "linear", "optm_weight_decay": 0.0},
        "optm_weight_decay_ramp",
        ('"linear"', "@.optm_weight_decay_start = 0.0", "@.optm_weight_decay = 0.0"),
    ),
    *of_both(training.one_optimizer, {"optm_lr": [1e-4, 1e-5]}, "optm_lr", ("list of 2",)),
    *of_both(
        training.warmup_ends_in_time,
        {"train.max_num_steps": 10},
        "optm_warmup_steps",
        ("20 steps", "train.max_num_steps = 10"),
    )[:1],
    Case(
        training.warmup_ends_in_time,
        {"train.max_num_steps": 20, "train.optm_warmup_steps": 20},
        "train.optm_warmup_steps",
        ("train.max_num_steps = 20",),
        SFT,
    ),
]

CKPT = [
    Case(
        ckpt.uploads_have_a_place,
        {"train.ckpt.upload_s3": True, "train.ckpt.enable_checkpoint": True},
        "train.ckpt.upload_s3",
        ("true", "train.ckpt.s3_bucket is unset"),
    ),
    Case(
        ckpt.uploads_have_a_place,
        {"train.ckpt.upload_s3": "final", "train.ckpt.s3_bucket": "mine"},
        "train.ckpt.upload_s3",
        ('"final"', "train.ckpt.enable_checkpoint = false"),
    ),
    Case(
        ckpt.uploads_have_a_place,
        {"train.ckpt.s3_bucket": "mine"},
        "train.ckpt.s3_bucket",
        ('"mine"', "train.ckpt.upload_s3 = false"),
    ),
    *(
        Case(
            ckpt.hub_uploads_are_complete,
            {"train.ckpt.upload_hf": True, "train.ckpt.hf_repo_name": name},
            "train.ckpt.upload_hf",
            ("train.ckpt.hf_repo_name", shown),
        )
        for name, shown in (("", "empty"), ("Comos-Reason1", '"Comos-Reason1"'))
    ),
    Case(
        ckpt.hub_uploads_are_complete,
        {
            "train.ckpt.upload_hf": True,
            "train.ckpt.hf_repo_name": "me/model",
            "train.ckpt.export_safetensors": False,
        },
        "train.ckpt.upload_hf",
        ("train.ckpt.export_safetensors = false",),
    ),
    *(
        Case(ckpt.names_are_valid, {key: value}, key, (value,))
        for key, value in (
            ("train.ckpt.s3_bucket", "My_Bucket"),
            ("train.ckpt.s3_bucket", "s3://mine/there"),
            ("train.ckpt.s3_bucket", "192.168.0.1"),
            ("train.ckpt.s3_bucket", "a..b"),
            ("train.ckpt.s3_prefix", "../up"),
            ("train.ckpt.s3_prefix", "with space"),
            ("train.ckpt.hf_repo_name", "no-owner"),
            ("train.ckpt.hf_repo_name", "me/mo--del"),
            ("train.ckpt.hf_repo_name", "me/my/model"),
        )
    ),
    Case(
        ckpt.there_is_something_to_upload,
        {"train.ckpt.upload_s3": "final", "launcher.export_final": False},
        "train.ckpt.upload_s3",
        ('"final"', "launcher.export_final = false"),
    ),
    Case(
        ckpt.there_is_something_to_upload,
        {"train.ckpt.upload_hf": True, "train.ckpt.enable_checkpoint": False},
        "train.ckpt.upload_hf",
        ("train.ckpt.enable_checkpoint = false",),
    ),
    Case(
        ckpt.checkpoints_hold_weights,
        {"train.ckpt.save_contents": ["optimizer", "extra"], "train.ckpt.export_safetensors": False},
        "train.ckpt.save_contents",
        ("leaves out the weights", "train.ckpt.export_safetensors = false"),
    ),
    Case(
        ckpt.epochs_end_in_time,
        {"train.ckpt.save_freq_in_epoch": 3, "train.epoch": 2},
        "train.ckpt.save_freq_in_epoch",
        ("3 epochs are never complete", "train.epoch = 2"),
    ),
    Case(
        ckpt.loads_what_was_saved,
        {"train.ckpt.save_contents": ["model"], "train.ckpt.load_contents": ["model", "extra"]},
        "train.ckpt.load_contents",
        ('["extra"]', 'train.ckpt.save_contents = ["model"]'),
    ),
    Case(
        ckpt.loads_what_was_saved,
        {"train.ckpt.load_contents": ["optimizer", "extra"]},
        "train.ckpt.load_contents",
        ('["optimizer", "extra"]', "no weights"),
    ),
    Case(
        ckpt.loads_what_was_saved,
        {"train.ckpt.load_contents": ["model", "hf_model", "extra"]},
        "train.ckpt.load_contents",
        ("twice",),
    ),
    Case(
        ckpt.loads_what_was_saved,
        {"train.ckpt.load_contents": ["hf_model", "extra"], "train.ckpt.export_safetensors": False},
        "train.ckpt.load_contents",
        ("train.ckpt.export_safetensors = false",),
    ),
    Case(
        ckpt.loads_what_was_saved,
        {"train.ckpt.load_contents": ["model"]},
        "train.ckpt.load_schedule",
        ('train.ckpt.load_contents = ["model"]',),
    ),
]

PRECISION = [
    Case(
        training.one_narrow_format,
        {"train.fp8.enable_fp8": True, "train.fp4.enable_fp4": True},
        "train.fp4.enable_fp4",
        ("train.fp8.enable_fp8 = true",),
    ),
    Case(
        training.overlap_is_possible,
        {"train.async_tp_enabled": True, "train.compile": True},
        "train.async_tp_enabled",
        ("policy.parallelism.tp_size = 1",),
    ),
    Case(
        training.overlap_is_possible,
        {"train.async_tp_enabled": True, "policy.parallelism.tp_size": 2},
        "train.async_tp_enabled",
        ("train.compile = false",),
    ),
    Case(
        training.recomputation_is_on,
        {"train.recompute_granularity": "selective", "policy.model_gradient_checkpointing": False},
        "train.recompute_granularity",
        ('"selective"', "policy.model_gradient_checkpointing = false"),
    ),
    Case(
        training.recomputation_is_on,
        CRITIC | {"critic.recompute_moe_layers": True, "critic.model_gradient_checkpointing": False},
        "critic.recompute_moe_layers",
        ("critic.model_gradient_checkpointing = false",),
    ),
    *(
        Case(
            training.wrapping_is_one_way,
            extra | {f"{section}.fsdp_wrap_min_params": 1000, f"{section}.fsdp_wrap_layers": ["Layer"]},
            f"{section}.fsdp_wrap_min_params",
            ("1000", f"{section}.fsdp_wrap_layers = ['Layer']"),
        )
        for section, extra in (("train", {}), ("critic", CRITIC), ("reference", {}))
    ),
]

PRECISION += [
    Case(
        training.casts_are_fused,
        {f"train.{name}.enable_{name}": True},
        f"train.{name}.enable_{name}",
        ("train.compile = false",),
    )
    for name in ("fp8", "fp4")
]

LORA = [
    Case(
        training.adapters_train_alone,
        ADAPTER | {"policy.trainable_map": {"lm_head": True}},
        "policy.trainable_map",
        ("policy.lora",),
    ),
    Case(
        training.adapters_train_alone,
        ADAPTER | {"policy.freeze_moe_router": True},
        "policy.freeze_moe_router",
        ("policy.lora",),
    ),
    Case(
        training.adapters_train_alone,
        CRITIC | {"critic.lora.r": 4, "critic.freeze_moe_router": True},
        "critic.freeze_moe_router",
        ("critic.lora",),
    ),
    Case(
        training.something_trains,
        {"policy.trainable_map": {"lm_head": False}},
        "policy.trainable_map",
        ("no parameter",),
    ),
    Case(training.something_trains, {"policy.trainable_map": {}}, "policy.trainable_map", ("empty",)),
    *(
        Case(
            training.base_is_not_narrow,
            ADAPTER | {f"train.{name}.enable_{name}": True},
            f"train.{name}.enable_{name}",
            ("policy.lora (r = 4)",),
        )
        for name in ("fp8", "fp4")
    ),
    Case(
        training.initialisers_have_what_they_need,
        {"policy.lora.init_lora_weights": "loftq"},
        "policy.lora.init_lora_weights",
        ('"loftq"', "policy.model_name_or_path"),
    ),
    Case(
        training.modules_are_named_once,
        {"policy.lora.target_modules": []},
        "policy.lora.target_modules",
        ("no adapter",),
    ),
    Case(
        training.modules_are_named_once,
        {"policy.lora.target_modules": ["q_proj"], "policy.lora.modules_to_save": ["lm_head", "q_proj"]},
        "policy.lora.modules_to_save",
        ("q_proj", "policy.lora.target_modules = ['q_proj']"),
    ),
    *(
        Case(training.patterns_are_sound, {f"policy.lora.{key}": value}, f"policy.lora.{key}", (word,))
        for key, value, word in (
            ("r_pattern", {"layers.(0": 4}, "layers.(0"),
            ("r_pattern", {"q_proj": 0}, "`q_proj` = 0"),
            ("alpha_pattern", {"[": 1.0}, "regular expression"),
            ("alpha_pattern", {"v": -1.0}, "`v` = -1.0"),
            ("target_modules", "*_proj", "regular expression"),
        )
    ),
    Case(training.dropout_is_meant, {"policy.lora.lora_dropout": 0.1}, "policy.lora.lora_dropout", ("0.1",)),
]

ROLE = [
    Case(
        role.autoscaling_has_room,
        {"autoscale.enable": True, "autoscale.min_replicas": 9},
        "autoscale.min_replicas",
        ("9", "autoscale.max_replicas = 8"),
    ),
    Case(
        role.autoscaling_has_room,
        {"autoscale.enable": True, "autoscale.min_replicas": 2},
        "autoscale.min_replicas",
        ("2", "rollout.parallelism.n_init_replicas = 1"),
    ),
    Case(
        role.autoscaling_has_room,
        {"autoscale.enable": True, "rollout.parallelism.n_init_replicas": 10},
        "autoscale.max_replicas",
        ("8", "rollout.parallelism.n_init_replicas = 10"),
    ),
    Case(role.autoscaling_has_room, {"autoscale.enable": True}, "autoscale.enable", ('"sft"',), SFT),
    Case(
        role.validation_leaves_replicas,
        {"validation.enable": True, "validation.max_replicas": 3},
        "validation.max_replicas",
        ("3", "rollout.parallelism.n_init_replicas = 1"),
    ),
    Case(
        role.validation_leaves_replicas,
        {"validation.enable": True, "validation.max_replicas": 9, "autoscale.enable": True},
        "validation.max_replicas",
        ("9", "autoscale.max_replicas = 8"),
    ),
    Case(
        role.reward_model_is_named,
        {"reward_model.enable": True},
        "reward_model.enable",
        ("reward_model.model_name_or_path", "reward_model.custom_class"),
    ),
    Case(role.reward_model_is_named, {"reward_model.enable": True}, "reward_model.enable", ('"sft"',), SFT),
    Case(
        role.domains_are_shared,
        {f"{P}.domain_shares": {"math": 1.0}},
        f"{P}.domain_shares",
        ("{math = 1}", f'{P}.domain_column_name = ""'),
    ),
    Case(
        role.domains_are_shared,
        {f"{P}.domain_column_name": "topic"},
        f"{P}.domain_column_name",
        ('"topic"', f"{P}.domain_shares is empty"),
    ),
    Case(
        role.domains_are_shared,
        {f"{P}.domain_column_name": "topic", f"{P}.domain_shares": {"math": 0.5, "code": 0.25}},
        f"{P}.domain_shares",
        ("{math = 0.5, code = 0.25} add up to 0.75",),
    ),
    Case(
        role.domains_are_shared,
        {f"{P}.domain_column_name": "topic", f"{P}.domain_shares": {"math": 1.5, "code": -0.5}},
        f"{P}.domain_shares",
        ("code has no positive share",),
    ),
]

ROLE += [
    Case(
        role.validation_samples_differ,
        {"validation.enable": True, "validation.temperature": 0.6},
        "validation.temperature",
        ("0.6", "validation.top_k = 1"),
    ),
    Case(
        role.validation_samples_differ,
        {"validation.enable": True, "validation.n_generation": 4},
        "validation.n_generation",
        ("4 greedy answers", "validation.temperature = 0.0"),
    ),
]

M, R, C = "policy.parallelism", "rollout.parallelism", "critic.parallelism"
MESH = [
    *(
        Case(mesh.stages_have_a_pipeline, {f"{M}.{key}": value}, f"{M}.{key}", (f"{M}.pp_size = 1",))
        for key, value in (("virtual_pp_size", 2), ("pp_micro_batch_size", 2), ("pp_dynamic_shape", True))
    ),
    Case(
        mesh.stages_have_a_pipeline,
        {f"{M}.pp_size": 2, f"{P}.mini_batch": 3},
        f"{M}.pp_micro_batch_size",
        (f"{P}.mini_batch = 3", "pieces of 1", f"{M}.pp_size = 2"),
    ),
    Case(
        mesh.stages_have_a_pipeline,
        CRITIC | {f"{C}.pp_size": 4, f"{C}.pp_micro_batch_size": 2, "critic.mini_batch": 4},
        f"{C}.pp_micro_batch_size",
        ("critic.mini_batch = 4",),
    ),
    Case(
        mesh.sequences_are_split_by_tensors,
        {f"{M}.sequence_parallel": True},
        f"{M}.sequence_parallel",
        (f"{M}.tp_size = 1",),
    ),
    Case(
        mesh.experts_fill_a_stage,
        {f"{M}.ep_size": 3, f"{M}.dp_shard_size": 4},
        f"{M}.ep_size",
        ("3 does not divide the 4 ranks", "dp_shard_size 4"),
    ),
    Case(
        mesh.ranks_are_countable,
        {f"{M}.n_init_replicas": 300, f"{M}.dp_shard_size": 300},
        f"{M}.n_init_replicas",
        ("300 replicas of 300", "90000 ranks, more than 65536"),
    ),
    Case(
        mesh.ranks_are_countable,
        {f"{R}.n_init_replicas": 65_536, f"{R}.tp_size": 2},
        f"{R}.n_init_replicas",
        ("131072 ranks",),
    ),
    Case(
        mesh.dispatch_has_ranks,
        {"policy.moe_token_dispatcher": "allgather"},
        "policy.moe_token_dispatcher",
        ('"allgather"', f"{M}.ep_size = 1"),
    ),
    Case(
        mesh.dispatch_has_ranks,
        {
            "policy.moe_token_dispatcher": "allgather",
            "policy.moe_shared_expert_overlap": True,
            f"{M}.ep_size": 2,
        },
        "policy.moe_shared_expert_overlap",
        ('policy.moe_token_dispatcher = "allgather"',),
    ),
    *(
        Case(mesh.engines_have_such_a_mesh, {f"{R}.{key}": value}, f"{R}.{key}", (shown,))
        for key, value, shown in (
            ("cp_size", 2, "2 is not possible"),
            ("dp_replicate_size", 2, "rollout.parallelism.n_init_replicas"),
            ("virtual_pp_size", 2, "2 is not possible"),
            ("pp_micro_batch_size", 2, "2 is not possible"),
            ("sequence_parallel", True, "true is not possible"),
            ("pp_dynamic_shape", True, "true is not possible"),
        )
    ),
    Case(
        mesh.engines_have_such_a_mesh,
        {f"{R}.tp_size": 4, f"{R}.ep_size": 2},
        f"{R}.ep_size",
        ("2 is not possible", f"{R}.tp_size = 4"),
    ),
]

CASES = BATCH + TIMING + LOSS + ESTIMATOR + KL + LENGTH + SCHEDULE + CKPT + PRECISION + LORA + ROLE + MESH
MODULES = (batch, timing, algorithm, training, ckpt, role, mesh)

SOUND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GRPO, CRITIC),
    (GRPO, CRITIC | {"critic.warmup_steps": 19, "train.max_num_steps": 20}),
    (GRPO, ALONE | {f"{P}.advantage_estimator": "reinforce_plus_plus", f"{P}.gamma": 0.99}),
    (GRPO, ALONE | {f"{P}.advantage_estimator": "remax"}),
    (GRPO, {f"{P}.advantage_estimator": "mine.py:advantages", f"{P}.gamma": 0.9, "critic.enable": True}),
    (GRPO, CRITIC | {f"{P}.gae_lambda": 0.95, f"{P}.gamma": 0.99}),
    (GRPO, {f"{P}.kl_beta": 0.1, f"{P}.kl_type": "full", "reference.offload": True}),
    (
        GRPO,
        {
            f"{P}.kl_beta": 0.1,
            f"{P}.reference_reset_interval": 5,
            f"{P}.reset_optimizer_with_reference": False,
        },
    ),
    (
        GRPO,
        {
            f"{P}.kl_in_reward.beta": 0.1,
            f"{P}.kl_in_reward.controller": "adaptive",
            f"{P}.kl_in_reward.target": 0.2,
            "reference.offload": True,
        },
    ),
    (GRPO, {f"{P}.mini_batch_shuffle": True, f"{P}.mini_batch_shuffle_seed": 1, f"{P}.mu_iterations": 2}),
    (GRPO, {f"{P}.mini_batch_shuffle": True, f"{P}.batch_size_per_optimize": 8}),
    (GRPO, {f"{P}.aipo_rho": 4.0, f"{P}.variant": "dapo"}),
    (GRPO, {f"{P}.use_decoupled_loss": True, f"{P}.behav_imp_weight_cap": 5.0}),
    (
        GRPO,
        {
            f"{P}.rollout_correction.weights": "token",
            f"{P}.rollout_correction.cap": 3.0,
            f"{P}.rollout_correction.reject": "sequence",
            f"{P}.rollout_correction.reject_below": 0.5,
            f"{P}.rollout_correction.reject_above": 2.0,
        },
    ),
    (SFT, {"train.optm_decay_type": "inverse_sqrt"}),
    (
        SFT,
        {"train.optm_decay_type": "wsd", "train.optm_decay_steps": 10, "train.optm_wsd_decay_type": "linear"},
    ),
    (SFT, {"train.optm_decay_type": "wsd", "train.optm_decay_ratio": 0.1, "train.optm_num_cycles": 1.5}),
    (SFT, {"train.optm_weight_decay_ramp": "cosine", "train.optm_weight_decay_start": 0.3}),
    (SFT, {"critic.optm_lr": [0.1, 0.2]}),  # a critic that is not there is somebody else's fault
    (
        GRPO,
        {
            "train.ckpt.upload_s3": "all",
            "train.ckpt.s3_bucket": "mine",
            "train.ckpt.enable_checkpoint": True,
            "train.ckpt.upload_hf": True,
            "train.ckpt.hf_repo_name": "me/model",
        },
    ),
    (GRPO, {"train.ckpt.load_contents": ["hf_model", "extra"]}),
    (GRPO, {"train.ckpt.save_contents": ["optimizer"]}),
    (GRPO, {"train.ckpt.save_freq_in_epoch": 2, "train.epoch": 2}),
    (GRPO, {"train.ckpt.load_contents": ["model"], "train.ckpt.load_schedule": False}),
    (
        GRPO,
        {
            "train.async_tp_enabled": True,
            "train.compile": True,
            f"{M}.tp_size": 2,
            f"{M}.sequence_parallel": True,
        },
    ),
    (
        GRPO,
        ADAPTER
        | {"policy.lora.r_pattern": {r"layers\.\d+\.q_proj": 8}, "policy.lora.target_modules": ".*_proj"},
    ),
    (GRPO, {"policy.lora.target_modules": ["q"], "policy.lora.modules_to_save": ["lm_head"]}),
    (GRPO, {"policy.trainable_map": {"lm_head": True, "model": False}}),
    (GRPO, {"autoscale.enable": True, "autoscale.min_replicas": 0}),
    (GRPO, {"reward_model.enable": True, "reward_model.custom_class": "mine.py:Scorer"}),
    (GRPO, {f"{P}.domain_column_name": "topic", f"{P}.domain_shares": {"a": 0.333, "b": 0.667}}),
    (
        GRPO,
        {f"{M}.pp_size": 2, f"{M}.virtual_pp_size": 2, f"{P}.mini_batch": 4, f"{M}.pp_micro_batch_size": 2},
    ),
    (
        GRPO,
        {
            f"{M}.ep_size": 4,
            f"{M}.dp_shard_size": 2,
            f"{M}.tp_size": 2,
            "policy.moe_token_dispatcher": "allgather",
        },
    ),
    (GRPO, VLLM | {f"{R}.tp_size": 4, f"{R}.ep_size": 4, f"{R}.pp_size": 2}),
    (GRPO, VLLM | {"rollout.max_num_batched_tokens": 4096}),
    (SFT, {f"{R}.cp_size": 4}),
]


def test_a_fault_is_named_with_a_remedy_that_works() -> None:
    check_each(CASES, lambda case: check_case(case, GRPO))


def test_every_rule_of_these_modules_is_tried_and_asked() -> None:
    tried = {case.rule for case in CASES} | {timing.the_same_bits_are_possible}  # its cases: test_timing
    known = {
        rule for rule in (*RULES, *WARNINGS) if rule.__module__ in {module.__name__ for module in MODULES}
    }
    assert tried == known


@pytest.mark.parametrize(
    ("base", "values"), SOUND, ids=lambda value: ",".join(value) if len(value) < 6 else ""
)
def test_what_stands_next_to_a_fault_is_sound(base: dict[str, Any], values: dict[str, Any]) -> None:
    config = Config.model_validate(written(base, values))
    found = [
        problem.render()
        for rule in RULES
        if rule.__module__ in {m.__name__ for m in MODULES}
        for problem in rule(config)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("number", "value", "nearest"), [(16, 5, 4), (12, 5, 4), (20, 16, 20), (7, 3, 1), (9, 16, 9)]
)
def test_the_nearest_divisor(number: int, value: int, nearest: int) -> None:
    assert batch.nearest_divisor(number, value) == nearest
    huge = 10**60 * number
    assert huge % batch.nearest_divisor(huge, 10**50 + 1) == 0  # and it does not take for ever


def test_faults_of_an_absent_critic_are_not_told() -> None:
    config = Config.model_validate(
        written(GRPO, {"critic.optm_decay_steps": 3, "critic.mini_batch_shuffle": True})
    )
    assert [
        problem
        for module in MODULES
        for rule in RULES
        if rule.__module__ == module.__name__
        for problem in rule(config)
    ] == []
