"""Every rule between keys, fault by fault: who is blamed, that the message names keys and values, that the remedy
works (`tests.schema.remedies`), and what stands next to each fault and is sound.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from schema.config import Config
from schema.config.loading.explain import all_fields
from schema.config.rules import RULES, WARNINGS, algorithm, batch, mesh, profiler, role, timing, trainable, training
from schema.config.rules import checkpoint as ckpt
from schema.config.rules.rows import FirstOf, InGrpo, Rule
from schema.config.rules.rows import Row as Row_
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import Case, Row, cases, check_case, config_of, never_asked
from tests.support.each import check_each

P, K, L = "train.train_policy", "train.ckpt", "policy.lora"
M, R, C = "policy.parallelism", "rollout.parallelism", "critic.parallelism"
REF = "reference.parallelism"
FIX, KL, PENALTY = f"{P}.rollout_correction", f"{P}.kl_in_reward", f"{P}.overlong_reward"
ESTIMATOR, OPTIMIZE = f"{P}.advantage_estimator", "batch_size_per_optimize"
CRITIC = {"critic.enable": True, ESTIMATOR: "gae"}
REFERENCE = {f"{P}.kl_beta": 0.1}
PAIR = {f"{M}.n_init_replicas": 2, "train.ckpt.enable_checkpoint": True}
FOUR = {f"{M}.dp_shard_size": 4}
"""Ranks of the policy."""
VLLM = {"rollout.backend": "vllm"}
PROFILE = "profiler.sub_profiler_config"
PROFILED = {"profiler.enable_profiler": True, f"{PROFILE}.do_profile": True}
ALONE = {"rollout.n_generation": 1, "rollout.max_concurrent_samples": 8}
ADAPTER = {f"{L}.r": 4}
GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k")


def of_both(*rows: Row) -> list[Row]:
    """The same faults in the policy's optimizer and in the critic's: `@` stands for their section."""
    return [
        (
            {key.replace("@", section): value for key, value in values.items()} | extra,
            *(word.replace("@", section) for word in words),
        )
        for values, *words in rows
        for section, extra in (("train", {}), ("critic", CRITIC))
    ]


FAULTS = {
    batch.batch_is_whole_groups: [
        ({"train.train_batch_per_replica": 20}, "20 samples", "rollout.n_generation = 16"),
        ({"train.train_batch_per_replica": 2**20 - 1},),
        ({"train.train_batch_per_replica": 8},),
        ({"train.train_batch_per_replica": 5, "rollout.n_generation": 4} | PAIR,),
        ({"train.train_batch_per_replica": 3} | PAIR | {f"{M}.n_init_replicas": 3},),
    ],
    batch.optimizer_steps_divide_batch: [
        ({f"{P}.{OPTIMIZE}": 5}, "train.train_batch_per_replica = 16", "5 samples"),
        *(({f"{P}.{OPTIMIZE}": size, "train.train_batch_per_replica": 48}, str(size)) for size in (20, 64)),
        ({f"critic.{OPTIMIZE}": 10**30} | CRITIC, "train.train_batch_per_replica = 16"),
    ],
    batch.shuffling_has_pieces: [
        (
            {f"{P}.mini_batch_shuffle": True},
            *(f"{P}.mu_iterations = 1", f"{P}.{OPTIMIZE} (unset)", "train_batch_per_replica = 16"),
        ),
        (
            {"critic.mini_batch_shuffle": True, f"critic.{OPTIMIZE}": 16} | CRITIC,
            *("critic.mu_iterations = 1", "(16)"),
        ),
        ({f"{P}.mini_batch_shuffle_seed": 7}, f"{P}.mini_batch_shuffle = false"),
    ],
    batch.longest_sample_fits: [
        (
            {f"{section}.max_token_len_per_mini_batch": 100} | extra,
            *("policy.model_max_length = 4096", "micro-batch of 100"),
        )
        for section, extra in ((P, {}), (f"{P}.old_log_prob", {}), ("reference", {}), ("critic", CRITIC))
    ],
    "masks_leave_samples": [
        (
            {f"{P}.sample_masks.mean_score_above": 0.5, f"{P}.sample_masks.mean_score_below": 0.5},
            *("above 0.5", "mean_score_below = 0.5"),
        ),
        ({f"{P}.sample_masks.failed_from_tokens": 2049}, "rollout.max_response_length = 2048"),
    ],
    batch.responses_leave_room: [
        ({"rollout.max_response_length": 4096}, "4096 tokens", "policy.model_max_length = 4096", "up to 4095")
    ],
    "engine_steps_hold_enough": [
        ({"rollout.max_num_batched_tokens": 100} | VLLM | others, *words)
        for others, *words in (
            ({}, "100 tokens", "policy.model_max_length = 4096", "rollout.enable_chunked_prefill = false"),
            ({"rollout.max_model_len": 3000}, "rollout.max_model_len = 3000"),
            (
                {"rollout.enable_chunked_prefill": True, "rollout.max_num_seqs": 128},
                *("100 tokens", "rollout.max_num_seqs = 128"),
            ),
        )
    ],
    "profiles_are_enabled": [({f"{PROFILE}.do_profile": True}, "profiler.enable_profiler = false")],
    profiler.profiled_ranks_exist: [
        ({f"{PROFILE}.rank_filter": [0, 1], f"{M}.dp_shard_size": 1}, "one rank, 0", "there is no 1"),
        (
            {f"{PROFILE}.rank_filter": [9, 4, 4], M: {"tp_size": 2, "dp_shard_size": 2}},
            *("4 ranks, from 0 to 3", "there is no 4"),
        ),
    ],
    "profiles_begin_in_time": [
        (
            {f"{PROFILE}.wait_steps": 9, "train.max_num_steps": 10} | PROFILED,
            *("9 steps", f"{PROFILE}.warmup_steps = 1", "train.max_num_steps = 10"),
        )
    ],
    "tables_have_samples": [
        ({"logging.log_training_samples": 40}, "logging.sample_groups = 2", "rollout.n_generation = 16"),
        ({"logging.log_training_samples": 1, "logging.sample_groups": 0, "logging.logger": ["wandb"]},),
    ],
    "profilers_share_a_gpu": [
        ({"profiler.enable_nsys": True, "profiler.enable_profiler": True}, "profiler.enable_profiler = true")
    ],
    "on_policy_agrees": [
        (
            {f"{P}.on_policy": True, f"{P}.allowed_outdated_steps": 2},
            *("on_policy = true", "allowed_outdated_steps = 2"),
        )
    ],
    timing.interval_fits_staleness: [
        ({"train.sync_weight_interval": 9}, "every 9 steps", "at least 8", "is 4"),
        ({"train.sync_weight_interval": 2, f"{P}.on_policy": True}, "every 2 steps"),
        ({"train.sync_weight_interval": 3, f"{P}.allowed_outdated_steps": 1}, "every 3 steps", "is 1"),
    ],
    "stragglers_are_bounded": [
        ({"controller.on_stale": "drop"}, "controller.straggler_timeout"),
        ({"controller.straggler_timeout": 5.0}, 'controller.on_stale = "wait"'),
    ],
    "timeouts_are_ordered": [
        ({f"controller.{name}": 1.0}, "1.0 s", "controller.heartbeat_interval")
        for name in ("lease_timeout", "heartbeat_timeout")
    ]
    + [({"controller.lease_timeout": 20, "controller.heartbeat_interval": 20.0}, "20.0")],
    "averages_agree": [
        ({f"{P}.unbiased_loss_max_tokens": 100}, *("100", f'{P}.loss_type = "seq-mean-token-mean"', '"token-mean"')),
        (
            {f"{P}.loss_type": "seq-mean-token-sum", f"{P}.variant": "gspo"},
            *(f'{P}.variant = "gspo"', '"seq-mean-token-sum"'),
        ),
    ],
    algorithm.clips_belong_to_their_loss: [
        *(
            ({f"{P}.lower_bound_ratio": 4.0, f"{P}.variant": variant}, "4.0", f"{P}.variant = {variant}")
            for variant in ("gspo", "cispo", "reinforce")
        ),
        ({f"{P}.epsilon_high": 0.28, f"{P}.variant": "reinforce"}, "0.28", f"{P}.variant = reinforce"),
        ({f"{P}.epsilon_low": 0.1, f"{P}.aipo_rho": 4.0}, "0.1", f"{P}.aipo_rho = 4.0"),
    ],
    "truncation_fits_the_loss": [
        ({f"{P}.aipo_rho": 4.0, f"{P}.variant": variant}, "4.0", f'{P}.variant = "{variant}"')
        for variant in ("gspo", "cispo", "reinforce", "mine.py:loss")
    ],
    "decoupling_is_on": [
        ({f"{P}.behav_imp_weight_cap": 5.0}, "5.0", f"{P}.use_decoupled_loss = false"),
        (
            {f"{FIX}.weights": "token", f"{P}.use_decoupled_loss": True},
            *('"token"', f"{P}.use_decoupled_loss = true"),
        ),
    ],
    algorithm.own_code_is_there: [
        ({f"{P}.variant": "none.py:loss"}, "file none.py cannot be read"),
        ({f"{P}.advantage_estimator": "none.py:mine"}, "file none.py cannot be read"),
    ],
    "old_pass_is_used": [({f"{P}.old_log_prob.mini_batch": 4}, "4", f"{P}.use_decoupled_loss = false")],
    "correction_is_complete": [
        ({f"{FIX}.reject": "token"}, '"token"', f"{FIX}.reject_below", f"{FIX}.reject_above"),
        ({f"{FIX}.reject_above": 2.0}, "2.0", f'{FIX}.reject = "none"'),
        (
            {f"{FIX}.reject_below": 2.0, f"{FIX}.reject_above": 0.5, f"{FIX}.reject": "geometric"},
            *("2.0", f"{FIX}.reject_above = 0.5"),
        ),
        ({f"{FIX}.cap": 3.0}, "3.0", f'{FIX}.weights = "none"'),
    ],
    "critic_agrees": [
        ({ESTIMATOR: "gae"}, '"gae"', "critic.enable = false"),
        ({"critic.enable": True, ESTIMATOR: "rloo"}, f'{ESTIMATOR} = "rloo"'),
    ],
    "critic_warms_up_in_time": [
        ({"critic.warmup_steps": 30, "train.max_num_steps": 20} | CRITIC, *("30 steps", "train.max_num_steps = 20"))
    ],
    algorithm.groups_are_large_enough: [
        *((ALONE | {ESTIMATOR: name}, f'{ESTIMATOR} = "{name}"', "rollout.n_generation = 1") for name in GROUPED),
        *(
            ({f"{P}.{key}": value, ESTIMATOR: "reinforce_plus_plus"} | ALONE, str(value), "rollout.n_generation = 1")
            for key, value in (("filter_reward_metric", "boxed_math"), ("min_filter_prefix_tokens", 8))
        ),
    ],
    algorithm.options_belong_to_their_estimator: [
        ({f"{P}.{key}": value, ESTIMATOR: name}, f'{ESTIMATOR} = "{name}"')
        for key, value, name in (
            ("gamma", 0.9, "grpo"),
            ("gae_lambda", 0.9, "reinforce_plus_plus"),
            ("unbiased_advantage", True, "rloo"),
        )
    ],
    "loss_term_is_on": [
        ({f"{P}.kl_type": "k1"}, '"k1"', f"{P}.kl_beta = 0.0"),
        ({f"{P}.unbiased_kl_estimate": True, f"{KL}.beta": 0.1}, f"{P}.kl_beta = 0.0"),
    ],
    "reference_is_used": [
        ({f"{P}.reference_reset_interval": 50}, "50", f"{P}.kl_beta = 0.0", f"{KL}.beta = 0.0"),
        ({"reference.model_name_or_path": "owner/name"}, f"{P}.kl_beta = 0.0"),
        ({"reference.parallelism": {"tp_size": 1}}, f"{P}.kl_beta = 0.0"),
    ],
    "resets_agree": [({f"{P}.reset_optimizer_with_reference": False}, f"{P}.reference_reset_interval is unset")],
    "reward_term_is_complete": [
        ({f"{KL}.type": "k2"}, '"k2"', f"{KL}.beta = 0.0"),
        ({f"{KL}.controller": "adaptive"}, '"adaptive"', f"{KL}.beta = 0.0"),
        ({f"{KL}.horizon": 100, f"{KL}.beta": 0.1}, "100", f'{KL}.controller = "fixed"'),
        ({f"{KL}.target": 0.5, f"{KL}.beta": 0.1}, "0.5", f'{KL}.controller = "fixed"'),
    ],
    training.warmup_is_a_share_or_steps: of_both(
        ({"@.optm_warmup_steps": 20.0}, "20.0", "at most 1.0"),
        (
            {"@.optm_decay_ratio": 0.6, "@.optm_warmup_steps": 0.7, "@.optm_decay_type": "linear"},
            *("0.6", "@.optm_warmup_steps = 0.7"),
        ),
    ),
    training.decay_is_complete: of_both(
        (
            {"@.optm_decay_steps": 10, "@.optm_decay_ratio": 0.5, "@.optm_decay_type": "linear"},
            *("10", "@.optm_decay_ratio = 0.5"),
        ),
        ({"@.optm_decay_type": "cosine"}, "cosine", "@.optm_decay_ratio"),
        ({"@.optm_decay_steps": 10}, "@.optm_decay_type"),
        ({"@.optm_decay_type": "linear", "@.optm_decay_ratio": 0.0}, "linear"),
        ({"@.optm_decay_ratio": 0.4, "@.optm_decay_type": "none"}, "@.optm_decay_type"),
        ({"@.optm_decay_ratio": 0.5, "@.optm_decay_type": "inverse_sqrt"}, '@.optm_decay_type = "inverse_sqrt"'),
        ({"@.optm_min_lr_factor": 0.1}, "@.optm_decay_type"),
    ),
    training.decay_fits_the_run: of_both(
        (
            {"@.optm_decay_steps": 90, "@.optm_decay_type": "linear", "train.max_num_steps": 100},
            *("90", "@.optm_warmup_steps = 20", "train.max_num_steps = 100"),
        ),
        (
            {"@.optm_decay_steps": 5, "@.optm_decay_type": "linear", "train.max_num_steps": 10},
            "train.max_num_steps = 10",
        ),
    ),
    training.options_belong_to_their_shape: of_both(
        ({"@.optm_wsd_decay_type": "linear"}, '"linear"', '@.optm_decay_type = "none"'),
        ({"@.optm_num_cycles": 2.0, "@.optm_decay_type": "linear"}, *("2.0", '@.optm_decay_type = "linear"')),
    ),
    "weight_decay_ramp_agrees": of_both(
        ({"@.optm_weight_decay_start": 0.1}, "0.1", '@.optm_weight_decay_ramp = "constant"'),
        (
            {"@.optm_weight_decay_ramp": "linear", "@.optm_weight_decay": 0.0},
            *('"linear"', "@.optm_weight_decay_start = 0.0", "@.optm_weight_decay = 0.0"),
        ),
    ),
    training.lists_are_for_the_optimizers: of_both(
        ({"@.optm_lr": [1e-4, 1e-5]}, "list of 2", "there is one"),
        ({"@.optm_lr": []}, "list of 0"),
        ({"@.optm_impl": ["fused", "foreach"]}, "list of 2"),
        ({"@.optm_lr": [1e-4, 1e-5, 1e-6], "@.optm_name": "Muon"}, "list of 3", "Muon and AdamW"),
        ({"@.optm_impl": ["fused", "foreach"], "@.optm_name": "Muon"}, 'no implementation "fused"'),
    ),
    "options_are_the_optimizers": of_both(
        ({"@.optm_momentum": 0.9}, '@.optm_name = "AdamW"'),
        ({"@.optm_momentum": 0.9, "@.optm_name": "Adam8bit"}, '@.optm_name = "Adam8bit"'),
        ({"@.epsilon": 1e-7, "@.optm_name": "SGD"}, '@.optm_name = "SGD"'),
    ),
    "average_goes_somewhere": [
        ({"train.ema_decay": 0.9, "launcher.export_final": False}, "launcher.export_final = false")
    ],
    "uploads_have_a_place": [
        ({f"{K}.upload_s3": True, f"{K}.enable_checkpoint": True}, "true", f"{K}.s3_bucket is unset"),
        ({f"{K}.upload_s3": "final", f"{K}.s3_bucket": "mine"}, '"final"', f"{K}.enable_checkpoint = false"),
        ({f"{K}.s3_bucket": "mine"}, '"mine"', f"{K}.upload_s3 = false"),
    ],
    "hub_uploads_are_complete": [
        ({f"{K}.upload_hf": True, f"{K}.hf_repo_name": ""}, f"{K}.hf_repo_name", "empty"),
        ({f"{K}.upload_hf": True, f"{K}.hf_repo_name": "Comos-Reason1"}, *(f"{K}.hf_repo_name", '"Comos-Reason1"')),
        (
            {f"{K}.upload_hf": True, f"{K}.hf_repo_name": "me/model", f"{K}.export_safetensors": False},
            f"{K}.export_safetensors = false",
        ),
    ],
    ckpt.names_are_valid: [
        ({f"{K}.{key}": name}, name)
        for key, names in (
            ("s3_bucket", ("My_Bucket", "s3://mine/there", "192.168.0.1", "a..b")),
            ("s3_prefix", ("../up", "with space")),
            ("hf_repo_name", ("no-owner", "me/mo--del", "me/my/model")),
        )
        for name in names
    ],
    "there_is_something_to_upload": [
        ({f"{K}.upload_s3": "final", "launcher.export_final": False}, *('"final"', "launcher.export_final = false")),
        ({f"{K}.upload_hf": True, f"{K}.enable_checkpoint": False}, f"{K}.enable_checkpoint = false"),
    ],
    "checkpoints_hold_weights": [
        (
            {f"{K}.save_contents": ["optimizer", "extra"], f"{K}.export_safetensors": False},
            *("leaves out the weights", f"{K}.export_safetensors = false"),
        )
    ],
    "epochs_end_in_time": [
        ({f"{K}.save_freq_in_epoch": 3, "train.epoch": 2}, *("3 epochs are never complete", "train.epoch = 2"))
    ],
    ckpt.loads_what_was_saved: [
        (
            {f"{K}.load_contents": ["model", "extra"], f"{K}.save_contents": ["model"]},
            *('["extra"]', f'{K}.save_contents = ["model"]'),
        ),
        ({f"{K}.load_contents": ["optimizer", "extra"]}, '["optimizer", "extra"]', "no weights"),
        ({f"{K}.load_contents": ["model", "hf_model", "extra"]}, "twice"),
        (
            {f"{K}.load_contents": ["hf_model", "extra"], f"{K}.export_safetensors": False},
            f"{K}.export_safetensors = false",
        ),
    ],
    "scales_are_found_at_each_product": [
        ({"train.fp8.quant_recipe": "tensorwise"}, '"tensorwise" has no effect'),
        ({"train.fp8.fp8_recipe": "delayed_scaling", "train.fp8.enable_fp8": True}, "given up"),
        ({"train.fp8.enable_fp8": True, "train.param_dtype": "float32"}, 'train.param_dtype = "float32"'),
        ({"train.fp8.enable_fp8": True, f"{M}.tp_size": 2}, f"{M}.tp_size = 2"),
    ],
    "fp4_is_not_trained": [
        ({f"train.fp4.{name}": value}, "128 tokens")
        for name, value in (("enable_fp4", True), ("fp4_recipe", "delayed_scaling"), ("quant_recipe", "tensorwise"))
    ],
    "overlap_is_of_compiled_exchanges": [({"train.async_tp_enabled": True}, "collectives of DTensor")],
    training.kernels_take_their_types: [
        ({"train.fa_version": 2, "train.param_dtype": "float32"}, 'train.param_dtype = "float32"'),
        (
            {"train.fa_version": 3, "train.param_dtype": "bfloat16", "critic.param_dtype": "float32"} | CRITIC,
            'critic.param_dtype = "float32"',
        ),
    ],
    "kernels_take_whole_layers": [
        ({"policy.enable_liger_kernel": True, f"{M}.{size}": 2}, f"{M}.{size} = 2") for size in ("tp_size", "pp_size")
    ],
    "masters_hold_small_steps": [
        ({"train.master_dtype": "float16"}, "below 2e-4"),
        ({"critic.master_dtype": "float16"} | CRITIC, 'critic.param_dtype = "float16"'),
    ],
    "recomputation_is_on": [
        (
            {"train.recompute_granularity": "selective", "policy.model_gradient_checkpointing": False},
            *('"selective"', "policy.model_gradient_checkpointing = false"),
        ),
        (
            {"critic.recompute_moe_layers": True, "critic.model_gradient_checkpointing": False} | CRITIC,
            "critic.model_gradient_checkpointing = false",
        ),
    ],
    "wrapping_is_one_way": [
        (
            {f"{section}.fsdp_wrap_min_params": 1000, f"{section}.fsdp_wrap_layers": ["Layer"]} | extra,
            *("1000", f"{section}.fsdp_wrap_layers = ['Layer']"),
        )
        for section, extra in (("train", {}), ("critic", CRITIC), ("reference", {}))
    ],
    "optimizers_have_state": [
        (
            {f"{section}.optimizer_offload": True, f"{section}.optm_name": "SGD"} | extra,
            f'{section}.optm_name = "SGD"',
        )
        for section, extra in (("train", {}), ("critic", CRITIC))
    ],
    "casts_are_fused": [({"train.fp8.enable_fp8": True}, "train.compile = false")],
    "adapters_train_alone": [
        ({"policy.trainable_map": {"lm_head": True}} | ADAPTER, L),
        ({"policy.freeze_moe_router": True} | ADAPTER, L),
        ({"critic.freeze_moe_router": True, "critic.lora.r": 4} | CRITIC, "critic.lora"),
    ],
    "map_freezes_something": [
        ({"policy.trainable_map": {"lm_head": True}}, "no name is false"),
        ({"policy.trainable_map": {}}, "empty"),
    ],
    "base_is_not_narrow": [({"train.fp8.enable_fp8": True} | ADAPTER, f"{L} (r = 4)")],
    trainable.initialisers_have_what_they_need: [
        ({f"{L}.init_lora_weights": "loftq"}, '"loftq"', "policy.model_name_or_path"),
        ({"critic.lora.init_lora_weights": "eva"} | CRITIC, '"eva"', "[critic.lora] has seen no data"),
    ],
    trainable.decomposed_rows_are_whole: [
        ({f"{L}.use_dora": True, "policy.parallelism.tp_size": 2}, "policy.parallelism.tp_size = 2 cuts"),
        (
            {"critic.lora.use_dora": True, "critic.parallelism.tp_size": 2} | CRITIC,
            "critic.parallelism.tp_size = 2 cuts",
        ),
    ],
    "adapters_are_saved_as_such": [
        (
            {f"{K}.save_contents": ["optimizer"], f"{K}.enable_checkpoint": True}
            | {f"{K}.export_safetensors": True}
            | ADAPTER,
            *('["optimizer"]', f"{L} merged in"),
        ),
        ({f"{K}.load_contents": ["hf_model", "extra"]} | ADAPTER, '["hf_model", "extra"]', f"{L} merged in"),
    ],
    trainable.reference_of_adapters_is_the_base: [
        (
            {f"{P}.reference_reset_interval": 5, "reference.model_name_or_path": "other/model"}
            | {f"{P}.kl_beta": 0.1}
            | ADAPTER,
            *("5", "reference.model_name_or_path = 'other/model'"),
        ),
        (
            {f"{L}.init_lora_weights": False, f"{P}.kl_beta": 0.1}
            | {"placement.policy": [0], "placement.reference": [1]},
            *("false", "placement.reference = [1]"),
        ),
    ],
    "adapters_can_be_published_alone": [
        ({"weight_sync.lora": "adapter"} | more, '"adapter"', word)
        for more, word in (
            ({}, "without [policy.lora]"),
            ({f"{L}.init_lora_weights": "olora"}, f'{L}.init_lora_weights = "olora"'),
            ({f"{L}.modules_to_save": ["norm"]} | VLLM, f'{L}.modules_to_save = ["norm"]'),
            ({f"{L}.use_dora": True} | VLLM, f"{L}.use_dora = true is more"),
            (ADAPTER | {"rollout.load_format": "dummy"}, 'rollout.load_format = "dummy"'),
        )
    ],
    "offload_has_a_model": [
        ({"reference.offload": True, f"{P}.kl_beta": 0.1} | ADAPTER, "true"),
        ({"reference.fsdp_wrap_layers": ["Layer"], f"{P}.kl_beta": 0.1} | ADAPTER, '["Layer"]'),
        ({"reference.fsdp_wrap_min_params": 1000, f"{P}.kl_beta": 0.1} | ADAPTER, "1000"),
    ],
    trainable.modules_are_named_once: [
        ({f"{L}.target_modules": []}, "no adapter"),
        (
            {f"{L}.modules_to_save": ["lm_head", "q_proj"], f"{L}.target_modules": ["q_proj"]},
            *("q_proj", f"{L}.target_modules = ['q_proj']"),
        ),
    ],
    trainable.patterns_are_sound: [
        ({f"{L}.r_pattern": {"layers.(0": 4}}, "layers.(0"),
        ({f"{L}.r_pattern": {"q_proj": 0}}, "`q_proj` = 0"),
        ({f"{L}.alpha_pattern": {"[": 1.0}}, "regular expression"),
        ({f"{L}.alpha_pattern": {"v": -1.0}}, "`v` = -1.0"),
        ({f"{L}.target_modules": "*_proj"}, "regular expression"),
    ],
    "dropout_is_meant": [({f"{L}.lora_dropout": 0.1}, "0.1")],
    "autoscaling_has_room": [
        ({"autoscale.min_replicas": 9, "autoscale.enable": True}, "9", "autoscale.max_replicas = 8"),
        ({"autoscale.min_replicas": 2, "autoscale.enable": True}, "2", f"{R}.n_init_replicas = 1"),
        ({"autoscale.enable": True, "placement.share": "time"}, "take turns", '"time"'),
    ],
    role.images_are_pinned: [
        ({"kubernetes.image": "registry:5000/mine:latest"}, "registry:5000/mine:latest"),
        ({"kubernetes.redis_image": "valkey/valkey"}, "valkey/valkey"),
    ],
    "validation_leaves_replicas": [
        ({"validation.max_replicas": 3, "validation.enable": True}, "3", f"{R}.n_init_replicas = 1"),
        (
            {"validation.max_replicas": 9, "validation.enable": True, "autoscale.enable": True},
            *("9", "autoscale.max_replicas = 8"),
        ),
    ],
    "validation_alone_validates": [
        ({"validation.only": True}, "validation.enable = false"),
        (
            {"validation.only": True, "validation.enable": True, "validation.before": False},
            *("the initial weights", "validation.before = false"),
        ),
        (
            {"validation.only": True, "validation.enable": True, f"{M}.n_init_replicas": 2},
            *("from one process", f"{M}.n_init_replicas = 2"),
        ),
    ],
    "reward_model_is_named": [
        ({"reward_model.enable": True}, *("reward_model.model_name_or_path", "reward_model.custom_class"))
    ],
    "domains_are_shared": [
        ({f"{P}.domain_shares": {"math": 1.0}}, "{math = 1}", f'{P}.domain_column_name = ""'),
        ({f"{P}.domain_column_name": "topic"}, '"topic"', f"{P}.domain_shares is empty"),
        (
            {f"{P}.domain_shares": {"math": 0.5, "code": 0.25}, f"{P}.domain_column_name": "topic"},
            "{math = 0.5, code = 0.25} add up to 0.75",
        ),
        (
            {f"{P}.domain_shares": {"math": 1.5, "code": -0.5}, f"{P}.domain_column_name": "topic"},
            "code has no positive share",
        ),
    ],
    "validation_samples_differ": [
        ({"validation.temperature": 0.6, "validation.enable": True}, "0.6", "validation.top_k = 1"),
        (
            {"validation.n_generation": 4, "validation.enable": True},
            *("4 greedy answers", "validation.temperature = 0.0"),
        ),
    ],
    mesh.stages_have_a_pipeline: [
        *(
            ({f"{M}.{key}": value}, f"{M}.pp_size = 1")
            for key, value in (("virtual_pp_size", 2), ("pp_micro_batch_size", 2), ("pp_schedule", "GPipe"))
        ),
        (
            {f"{M}.pp_micro_batch_size": 2, f"{M}.pp_size": 2, f"{P}.max_token_len_per_mini_batch": 8192},
            "8192 cuts micro-batches by their tokens",
        ),
        (
            {f"{C}.pp_micro_batch_size": 2, f"{C}.pp_size": 4, "critic.mini_batch": 4} | CRITIC,
            "critic.mini_batch = 4",
        ),
        (
            {f"{REF}.pp_micro_batch_size": 2, f"{REF}.pp_size": 2, "reference.mini_batch": 4} | REFERENCE,
            "reference.mini_batch = 4 cuts micro-batches",
        ),
    ],
    mesh.roles_have_the_policys_ranks: [
        (
            {f"{REF}.dp_shard_size": 3, f"{REF}.tp_size": 1} | FOUR | REFERENCE,
            "a mesh of 3 ranks (dp_shard_size 3), and the policy's has 4 (dp_shard_size 4)",
        ),
        ({f"{C}.tp_size": 8} | FOUR | CRITIC, "a mesh of 8 ranks (tp_size 8)"),
        ({f"{C}.tp_size": 8, f"{C}.dp_shard_size": -1} | FOUR | CRITIC, "a mesh of 8 ranks (tp_size 8)"),
        (
            {f"{C}.dp_shard_size": 3, f"{C}.tp_size": 1, f"{M}.dp_shard_size": -1, f"{M}.pp_size": 2} | CRITIC,
            "no multiple of 2 (pp_size 2)",
        ),
        (
            {f"{REF}.n_init_replicas": 2, f"{REF}.dp_shard_size": 4, f"{REF}.tp_size": 1} | FOUR | REFERENCE,
            f"{M}.n_init_replicas = 1",
        ),
    ],
    mesh.several_trainers_share_their_work: [
        (
            {"train.ckpt.enable_checkpoint": False, f"{M}.n_init_replicas": 2},
            "of 2 policy replicas one that comes back loads a checkpoint",
        ),
        ({"train.ckpt.save_contents": ["model", "extra"], **PAIR}, "would not have the others' optimizer"),
        ({"policy.exchange": "store"}, "there is nobody to exchange gradients with"),
        ({**PAIR, REF: {"tp_size": 4}} | FOUR | REFERENCE, "a reference with a mesh of its own"),
        ({**PAIR, C: {"tp_size": 4}} | FOUR | CRITIC, "a critic with a mesh of its own"),
        ({**PAIR, "teacher": [{"name": "t", "model": "/m"}]}, "the answers of teachers"),
        ({**PAIR, "placement.share": "time"}, "devices with rollout replicas"),
    ],
    mesh.own_meshes_stand_alone: [
        ({REF: {"tp_size": 4}, **more} | FOUR, *words)
        for more, *words in (
            (REFERENCE | {f"{P}.kl_type": "full"}, f'{P}.kl_type = "full"'),
            ({KL: {"beta": 0.1, "type": "full"}}, f'{KL}.type = "full"'),
            (REFERENCE | {f"{P}.reference_reset_interval": 5}, "5 makes it a copy"),
            (REFERENCE | ADAPTER, "policy.lora"),
            (REFERENCE | {"placement.policy": [0, 1, 2, 3], "placement.reference": [4, 5, 6, 7]}, "[4, 5, 6, 7]"),
        )
    ],
    mesh.stages_take_any_shape: [
        ({f"{M}.pp_dynamic_shape": False, f"{M}.pp_size": 2}, f"{M}.pp_size = 2", "lengths of their own")
    ],
    "sequences_are_split_by_tensors": [({f"{M}.sequence_parallel": True}, f"{M}.tp_size = 1")],
    "experts_have_ranks": [
        ({f"{M}.ep_size": 3, f"{M}.dp_shard_size": 4}, "3 does not divide the 4 ranks"),
        ({f"{M}.ep_size": 4, f"{M}.tp_size": 2}, "tp_size = 2, whose ranks share"),
        ({f"{M}.ep_size": 2, f"{M}.cp_size": 2, f"{M}.dp_shard_size": 2}, "cp_size = 2"),
    ],
    mesh.ranks_are_countable: [
        (
            {f"{M}.n_init_replicas": 300, f"{M}.dp_shard_size": 300},
            *("300 replicas of 300", "90000 ranks, more than 65536"),
        ),
        ({f"{R}.n_init_replicas": 65_536, f"{R}.tp_size": 2}, "131072 ranks"),
    ],
    mesh.dispatch_has_ranks: [
        ({"policy.moe_token_dispatcher": "allgather"}, '"allgather"', f"{M}.ep_size = 1"),
        (
            {"policy.moe_shared_expert_overlap": True, "policy.moe_token_dispatcher": "allgather", f"{M}.ep_size": 2},
            'policy.moe_token_dispatcher = "allgather"',
        ),
        (
            {"policy.moe_shared_expert_overlap": True, M: {"ep_size": 2, "tp_size": 2}},
            f"the 2 ranks of {M}.tp_size have the same tokens",
        ),
    ],
    mesh.engines_have_such_a_mesh: [
        ({f"{R}.cp_size": 2}, "2 is not possible"),
        ({f"{R}.dp_replicate_size": 2}, f"{R}.n_init_replicas"),
        ({f"{R}.virtual_pp_size": 2}, "2 is not possible"),
        ({f"{R}.pp_micro_batch_size": 2}, "2 is not possible"),
        ({f"{R}.sequence_parallel": True}, "true is not possible"),
        ({f"{R}.pp_dynamic_shape": True}, "true is not possible"),
        ({f"{R}.pp_schedule": "GPipe"}, "its own schedule"),
        ({f"{R}.ep_size": 2, f"{R}.tp_size": 4}, "2 is not possible", f"{R}.tp_size = 4"),
    ],
}
GENERATES = {"validation.enable": True, "validation.generate": True}
SUPERVISED = {
    "critic_agrees": [({"critic.enable": True}, f'{P}.type = "sft"')],
    "reference_is_used": [({"reference.offload": True}, f'{P}.type = "sft"')],
    training.warmup_ends_in_time: [
        ({"train.optm_warmup_steps": 20, "train.max_num_steps": 20}, "train.max_num_steps = 20")
    ],
    "autoscaling_has_room": [({"autoscale.enable": True}, '"sft"')],
    "reward_model_is_named": [({"reward_model.enable": True}, '"sft"')],
    "answers_have_a_validation": [({"validation.generate": True}, "validation.enable = false")],
    "answers_are_scored": [({"validation.reward_function": {}} | GENERATES, "validation.generate = true")],
    role.generated_prompts_are_whole: [
        ({"validation.dataset.overlong_prompts": "left", "validation.dataset.name": "x.jsonl"} | GENERATES, '"left"'),
        ({f"{P}.dataset.overlong_prompts": "right"} | GENERATES, '"right"'),
    ],
}
SET = "validation.dataset.part[0]"


def validated(_enable: bool = True, **keys: Any) -> dict[str, Any]:
    """Validation of one set with these keys."""
    part = [{"name": "synthetic:addition", "source": "a", **keys}]
    return {"validation.dataset.part": part, "validation.enable": _enable}


NOT_WRITTEN = [
    Case(
        role.sets_are_drawn_as_written,
        validated(temperature=0.6),
        f"{SET}.temperature",
        ("0.6", "validation.top_k = 1"),
    ),
    Case(
        role.sets_are_drawn_as_written,
        validated(n_generation=4),
        f"{SET}.n_generation",
        ("4 greedy answers", "validation.temperature = 0.0"),
    ),
    Case(role.sets_are_drawn_as_written, validated(top_p=0.5), f"{SET}.top_p", ("validation.temperature = 0.0",)),
    Case(batch.responses_leave_room, validated(max_response_length=4096), f"{SET}.max_response_length", ("4096",)),
    Case("temperatures_can_be_computed", validated(temperature=0.001, top_k=-1), f"{SET}.temperature", ("0.01",)),
    Case(
        batch.responses_leave_room,
        {"rollout.max_model_len": 1024},
        "rollout.max_response_length",
        ("2048 tokens", "rollout.max_model_len = 1024"),
    ),
    Case(
        batch.overlong_buffer_fits,
        {f"{PENALTY}.enable_overlong_penalty": True, "rollout.max_response_length": 8191},
        f"{PENALTY}.buffer_length",
        ("begins at 4095 tokens", "policy.model_max_length = 4096"),
    ),
    Case(
        batch.overlong_buffer_fits,
        {f"{PENALTY}.enable_overlong_penalty": True},
        f"{PENALTY}.buffer_length",
        ("4096", "rollout.max_response_length = 2048"),
    ),
    Case(
        "timeouts_are_ordered",
        {"launcher.restart_backoff": 99.0},
        "launcher.restart_backoff_max",
        ("launcher.restart_backoff = 99.0",),
    ),
    Case(
        training.warmup_ends_in_time,
        {"train.max_num_steps": 10},
        "train.optm_warmup_steps",
        ("20 steps", "train.max_num_steps = 10"),
    ),
    Case(
        "loads_what_was_saved",
        {f"{K}.load_contents": ["model"]},
        f"{K}.load_schedule",
        (f'{K}.load_contents = ["model"]',),
    ),
    Case(
        "autoscaling_has_room",
        {"autoscale.enable": True, f"{R}.n_init_replicas": 10},
        "autoscale.max_replicas",
        ("8", f"{R}.n_init_replicas = 10"),
    ),
    Case(
        mesh.stages_have_a_pipeline,
        {f"{M}.pp_size": 2, f"{P}.mini_batch": 3},
        f"{M}.pp_micro_batch_size",
        (f"{P}.mini_batch = 3", "pieces of 1", f"{M}.pp_size = 2"),
    ),
]
"""Faults of which a key is blamed that has its default."""

SUPERVISED_SET = Case(
    role.supervised_sets_have_no_answers, validated(n_generation=2), f"{SET}.n_generation", base=SFT
)
CASES = [SUPERVISED_SET, *cases(FAULTS), *cases(SUPERVISED, SFT), *NOT_WRITTEN]
MODULES = (batch, timing, algorithm, trainable, training, ckpt, role, mesh, profiler)

SOUND: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GRPO, CRITIC),
    (GRPO, CRITIC | {"critic.warmup_steps": 19, "train.max_num_steps": 20}),
    (GRPO, ALONE | {ESTIMATOR: "reinforce_plus_plus", f"{P}.gamma": 0.99}),
    (GRPO, ALONE | {ESTIMATOR: "remax", f"{P}.filter_reward_metric": "boxed_math"}),
    (GRPO, {ESTIMATOR: f"{__file__}:found", f"{P}.gamma": 0.9}),
    (GRPO, CRITIC | {f"{P}.gae_lambda": 0.95, f"{P}.gamma": 0.99}),
    (GRPO, {f"{P}.kl_beta": 0.1, f"{P}.kl_type": "full", "reference.offload": True}),
    (GRPO, {f"{P}.kl_beta": 0.1, f"{P}.reference_reset_interval": 5, f"{P}.reset_optimizer_with_reference": False}),
    (GRPO, {KL: {"beta": 0.1, "controller": "adaptive", "target": 0.2}, "reference.offload": True}),
    (GRPO, {f"{P}.mini_batch_shuffle": True, f"{P}.mini_batch_shuffle_seed": 1, f"{P}.mu_iterations": 2}),
    (GRPO, {f"{P}.mini_batch_shuffle": True, f"{P}.{OPTIMIZE}": 8}),
    (GRPO, {f"{P}.sample_masks": {"mean_score_above": 0.0, "mean_score_below": 1.0}}),
    (GRPO, {f"{P}.sample_masks": {"truncated": True, "failed_from_tokens": 2048}}),
    (GRPO, {f"{P}.aipo_rho": 4.0, f"{P}.variant": "dapo"}),
    (GRPO, {f"{P}.use_decoupled_loss": True, f"{P}.behav_imp_weight_cap": 5.0}),
    (GRPO, {FIX: {"weights": "token", "cap": 3.0, "reject": "sequence", "reject_below": 0.5, "reject_above": 2.0}}),
    (GRPO, {f"{P}.on_policy": True, f"{P}.allowed_outdated_steps": 0}),
    (GRPO, {f"{P}.on_policy": False, f"{P}.allowed_outdated_steps": 4}),
    (GRPO, {"train.sync_weight_interval": 3, f"{P}.allowed_outdated_steps": 2}),
    (GRPO, {"controller.on_stale": "drop", "controller.straggler_timeout": 30.0}),
    (GRPO, {"controller.heartbeat_interval": 20.0, "controller.heartbeat_timeout": 30.0}),
    (GRPO, {f"{P}.unbiased_loss_max_tokens": 512, f"{P}.loss_type": "seq-mean-token-mean"}),
    (SFT, {"train.optm_warmup_steps": 1.0, "train.optm_lr": [1e-4], "train.optm_impl": ["foreach"]}),
    (SFT, {"train.optm_decay_ratio": 0.4, "train.optm_decay_type": "wsd", "train.optm_min_lr_factor": 0.1}),
    (SFT, {"train.optm_decay_type": "inverse_sqrt"}),
    (SFT, {"train.optm_decay_type": "wsd", "train.optm_decay_steps": 10, "train.optm_wsd_decay_type": "linear"}),
    (SFT, {"train.optm_decay_type": "wsd", "train.optm_decay_ratio": 0.1, "train.optm_num_cycles": 1.5}),
    (SFT, {"train.optm_weight_decay_ramp": "cosine", "train.optm_weight_decay_start": 0.3}),
    (SFT, {"train.optm_name": "Muon", "train.optm_lr": [1e-2, 1e-3], "train.optm_momentum": 0.9}),
    (SFT, {"train.optm_name": "Muon", "train.optm_lr": [1e-3], "train.optm_impl": ["for-loop", "foreach"]}),
    (SFT, {"train.optm_name": "SGD", "train.optm_momentum": 0.9, "train.ema_decay": 0.99}),
    (SFT, {"policy.override_config": {"attention_dropout": 0.0, "rms_norm_eps": 1e-5}}),
    (SFT, {"critic.optm_lr": [0.1, 0.2]}),  # a critic that is not there is somebody else's fault
    (
        GRPO,
        {
            K: {"enable_checkpoint": True, "upload_s3": "all", "s3_bucket": "mine"}
            | {"upload_hf": True, "hf_repo_name": "me/model"}
        },
    ),
    (GRPO, {f"{K}.load_contents": ["hf_model", "extra"]}),
    (GRPO, {f"{K}.save_contents": ["optimizer"]}),
    (GRPO, {f"{K}.save_freq_in_epoch": 2, "train.epoch": 2}),
    (GRPO, {f"{K}.load_contents": ["model"], f"{K}.load_schedule": False}),
    (GRPO, {"train.fp8.enable_fp8": True, "train.fp8.quant_recipe": "tensorwise", "train.compile": True}),
    (GRPO, {"train.fa_version": 3, "train.param_dtype": "float16", f"{M}.tp_size": 2}),
    (GRPO, {"policy.enable_liger_kernel": True, f"{M}.cp_size": 2}),
    (GRPO, ADAPTER | {f"{L}.r_pattern": {r"layers\.\d+\.q_proj": 8}, f"{L}.target_modules": ".*_proj"}),
    (GRPO, {f"{L}.target_modules": ["q"], f"{L}.modules_to_save": ["lm_head"]}),
    (GRPO, {f"{P}.kl_beta": 0.1, f"{P}.reference_reset_interval": 5} | ADAPTER),
    (GRPO, {"weight_sync.lora": "adapter", f"{L}.modules_to_save": ["lm_head"]} | ADAPTER),
    (GRPO, {f"{P}.kl_beta": 0.1, "placement.policy": [0], "placement.reference": [1]} | ADAPTER),
    (GRPO, {"policy.trainable_map": {"lm_head": True, "model": False}}),
    (GRPO, {"policy.trainable_map": {"model.embed_tokens.weight": False}}),
    (GRPO, {"autoscale.enable": True, "autoscale.min_replicas": 0}),
    (GRPO, {"reward_model.enable": True, "reward_model.custom_class": "mine.py:Scorer"}),
    (GRPO, {f"{P}.domain_column_name": "topic", f"{P}.domain_shares": {"a": 0.333, "b": 0.667}}),
    (GRPO, {M: {"tp_size": 1, "pp_size": 2, "virtual_pp_size": 2, "pp_micro_batch_size": 2}, f"{P}.mini_batch": 4}),
    (GRPO, {M: {"ep_size": 2, "dp_shard_size": 4, "tp_size": 1}, "policy.moe_token_dispatcher": "allgather"}),
    (GRPO, {M: {"tp_size": 2, "sequence_parallel": True}, "policy.moe_token_dispatcher": "allgather"}),
    (GRPO, VLLM | {f"{R}.tp_size": 4, f"{R}.ep_size": 4, f"{R}.pp_size": 2}),
    (GRPO, VLLM | {"rollout.max_num_batched_tokens": 4096}),
    (SFT, {f"{R}.cp_size": 4}),
    (GRPO, PROFILED | {f"{PROFILE}.wait_steps": 8, "train.max_num_steps": 10}),
    (GRPO, PROFILED | {f"{PROFILE}.rank_filter": [3], M: {"tp_size": 2, "dp_shard_size": 2}}),
    (GRPO, PROFILED | {f"{PROFILE}.rank_filter": [3], f"{M}.dp_shard_size": -1}),
]


def rules_of(*kinds: str) -> list[Rule]:
    """The rules of these modules, or their warnings; those of weights have a file of their own."""
    tables = [table for module in MODULES for name, table in vars(module).items() if name.endswith(kinds)]
    return [rule for table in tables for rule in table if rule not in ckpt.WEIGHT_RULES]


def found(base: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """What the rules of these modules refuse, as it is shown."""
    config = config_of(base, values)
    return [problem.render() for rule in rules_of("_RULES") for problem in rule(config)]


def test_a_fault_is_named_with_a_remedy_that_works() -> None:
    check_each(CASES, lambda case: check_case(case, GRPO))


def test_every_rule_of_these_modules_is_tried_and_asked() -> None:
    rules = rules_of("_RULES", "_WARNINGS")
    assert never_asked(rules, CASES, GRPO) == [*timing.TIMING_WARNINGS]  # their cases: test_timing
    assert set(rules) <= {*RULES, *WARNINGS}


def keys_named(rule: Rule) -> list[str]:
    """The keys of a row about the whole configuration, and those that its texts name; of others none."""
    if isinstance(rule, InGrpo | FirstOf):
        return [key for inner in rule.rules for key in keys_named(inner)]
    if not isinstance(rule, Row_):
        return []
    keys = [rule.key] if isinstance(rule.key, str) else [*rule.key]
    texts = " ".join(text for text in (rule.says, rule.hint) if isinstance(text, str))
    others = [*re.findall(r"{([a-z0-9_.]+)[=!~]?}", texts), *(rule.related or ())]
    table = keys[0].rpartition(".")[0]
    return keys + [f"{table}{other}" if other.startswith(".") else other for other in others]


def test_rows_name_keys_that_are_there() -> None:
    known = {".".join(path[:end]) for path in all_fields() for end in range(1, len(path) + 1)} | {*dir(Config)}
    assert [key for rule in (*RULES, *WARNINGS) for key in keys_named(rule) if key not in known] == []


@pytest.mark.parametrize(("base", "values"), SOUND, ids=lambda value: ",".join(value) if len(value) < 6 else "")
def test_what_stands_next_to_a_fault_is_sound(base: dict[str, Any], values: dict[str, Any]) -> None:
    assert found(base, values) == []


@pytest.mark.parametrize(
    ("number", "value", "nearest"), [(16, 5, 4), (12, 5, 4), (20, 16, 20), (7, 3, 1), (9, 16, 9)]
)
def test_the_nearest_divisor(number: int, value: int, nearest: int) -> None:
    assert batch.nearest_divisor(number, value) == nearest
    huge = 10**60 * number
    assert huge % batch.nearest_divisor(huge, 10**50 + 1) == 0  # and it does not take for ever


def test_faults_of_an_absent_critic_are_not_told() -> None:
    assert found(GRPO, {"critic.optm_decay_steps": 3, "critic.mini_batch_shuffle": True}) == []


def test_braces_in_what_a_user_writes_are_no_words_of_a_row() -> None:
    (shown,) = found(GRPO, {"train.ckpt.hf_repo_name": "a{}{.s3_bucket}"})
    assert 'train.ckpt.hf_repo_name: "a{}{.s3_bucket}" is not a repository name' in shown
