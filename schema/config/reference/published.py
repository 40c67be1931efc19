"""The published schema of cosmos-rl, whose names and defaults are ours: every section, property, type, default.

    PUBLISHED[section][property] = type as the page prints it, and the default
    PLACES[our section] = the published section that stands there

A type that is a section's name is a table of its own. Where our default is another one, `deviations` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Property(NamedTuple):
    """One property: its JSON types, as the page names them, and its default."""

    type: str
    default: Any = None

    @property
    def is_section(self) -> bool:
        """Whether the property is a table with properties of its own."""
        return "Config" in self.type


PUBLISHED: dict[str, dict[str, Property]] = {
    "Config": {
        "custom": Property("object", {}),
        "train": Property("TrainingConfig"),
        "rollout": Property("RolloutConfig"),
        "policy": Property("PolicyConfig"),
        "logging": Property("LoggingConfig"),
        "profiler": Property("ProfilerConfig"),
        "validation": Property("ValidationConfig"),
    },
    "CheckpointConfig": {
        "enable_checkpoint": Property("boolean", False),
        "save_freq": Property("integer", 20),
        "save_freq_in_epoch": Property("integer", 0),
        "save_mode": Property("string", "async"),
        "max_keep": Property("integer", 5),
        "export_safetensors": Property("boolean", True),
        "upload_hf": Property("boolean", False),
        "hf_repo_name": Property("string", "Comos-Reason1"),
        "upload_s3": Property("boolean | string", False),
        "s3_bucket": Property("string | null", None),
        "s3_prefix": Property("string", "outputs"),
    },
    "DatasetConfig": {
        "name": Property("string", ""),
        "subset": Property("string | null", ""),
        "revision": Property("string | null", ""),
        "split": Property("string | array of string", ""),
        "test_size": Property("number | integer | null", None),
    },
    "FP4Config": {
        "enable_fp4": Property("boolean", False),
        "fp4_recipe": Property("string", "dynamic_scaling"),
        "quant_recipe": Property("string", "rowwise"),
    },
    "FP8Config": {
        "enable_fp8": Property("boolean", False),
        "fp8_recipe": Property("string", "dynamic_scaling"),
        "quant_recipe": Property("string", "rowwise"),
    },
    "GrpoConfig": {
        "type": Property("string", "grpo"),
        "variant": Property("string", "grpo"),
        "dataset": Property("DatasetConfig"),
        "dataloader_shuffle": Property("boolean", True),
        "enable_dataset_cache": Property("boolean", False),
        "dataloader_num_workers": Property("integer", 0),
        "dataloader_prefetch_factor": Property("integer | null", None),
        "dataloader_batch_size": Property("integer | null", 1),
        "prompt_column_name": Property("string", ""),
        "response_column_name": Property("string", ""),
        "reward_function": Property("string | array of string | object of number", {"single_choice": 1.0}),
        "filter_reward_metric": Property("string | array of string", []),
        "temperature": Property("number", 1.0),
        "epsilon_low": Property("number", 0.2),
        "epsilon_high": Property("number", 0.2),
        "positive_nll_coef": Property("number | null", None),
        "lower_bound_ratio": Property("number", 3.0),
        "loss_type": Property("string", "token-mean"),
        "unbiased_loss_max_tokens": Property("integer | null", None),
        "unbiased_advantage": Property("boolean", False),
        "overlong_reward": Property("OverlongRewardConfig"),
        "kl_beta": Property("number", 0.0),
        "aipo_rho": Property("number | null", None),
        "mu_iterations": Property("integer", 1),
        "mini_batch": Property("integer", 2),
        "batch_size_per_optimize": Property("integer | null", None),
        "max_token_len_per_mini_batch": Property("integer | null", None),
        "entropy_coeff": Property("number", 0.0),
        "allowed_outdated_steps": Property("integer", 4),
        "on_policy": Property("boolean", False),
        "outdated_rollout_fetch_batch_size": Property("integer", 1),
        "min_filter_prefix_tokens": Property("integer | null", None),
        "max_retry_for_on_policy": Property("integer", 10),
        "reference_reset_interval": Property("integer | null", None),
        "reset_optimizer_with_reference": Property("boolean", True),
        "balance_dp_token": Property("boolean", False),
        "use_decoupled_loss": Property("boolean", False),
        "behav_imp_weight_cap": Property("number | null", None),
        "rollout_as_token_ids": Property("boolean", False),
    },
    "LoggingConfig": {
        "logger": Property("array of string", ["console"]),
        "project_name": Property("string", "cosmos_rl"),
        "experiment_name": Property("string | null", None),
    },
    "LoraConfig": {
        "r": Property("integer", 8),
        "lora_alpha": Property("number", 8.0),
        "lora_dropout": Property("number", 0.0),
        "target_modules": Property("array of string | string", None),
        "use_rslora": Property("boolean", False),
        "modules_to_save": Property("array of string | null", None),
        "alpha_pattern": Property("object of number | null", None),
        "r_pattern": Property("object of integer | null", None),
        "init_lora_weights": Property("boolean | string", True),
    },
    "MultiTurnRolloutConfig": {
        "enable": Property("boolean", False),
        "enable_tools": Property("boolean", False),
        "enable_thinking": Property("boolean", False),
        "custom_chat_template_path": Property("string | null", None),
        "max_assistant_turns": Property("integer", 5),
        "add_generation_prompt": Property("boolean", True),
        "continue_final_message": Property("boolean", False),
    },
    "OverlongRewardConfig": {
        "enable_overlong_penalty": Property("boolean", False),
        "buffer_length": Property("integer", 4096),
        "penalty_factor": Property("number", 1.0),
    },
    "ParallelismConfig": {
        "n_init_replicas": Property("integer", 1),
        "tp_size": Property("integer", 2),
        "cp_size": Property("integer", 1),
        "ep_size": Property("integer", 1),
        "dp_shard_size": Property("integer", 1),
        "pp_size": Property("integer", 1),
        "pp_dynamic_shape": Property("boolean", False),
        "pp_micro_batch_size": Property("integer", 1),
        "dp_replicate_size": Property("integer", 1),
    },
    "PolicyConfig": {
        "parallelism": Property("ParallelismConfig"),
        "model_name_or_path": Property("string", "Qwen/Qwen2.5-VL-7B-Instruct"),
        "model_revision": Property("string | null", None),
        "model_max_length": Property("integer", 4096),
        "model_gradient_checkpointing": Property("boolean", True),
        "lora": Property("LoraConfig | null", None),
        "trainable_map": Property("object of boolean | null", None),
        "enable_liger_kernel": Property("boolean", False),
    },
    "ProfilerConfig": {
        "enable_profiler": Property("boolean", False),
        "enable_nsys": Property("boolean", False),
        "sub_profiler_config": Property("SubProfilerConfig"),
    },
    "RolloutConfig": {
        "parallelism": Property("RolloutParallelismConfig"),
        "enforce_eager": Property("boolean", True),
        "include_stop_str_in_output": Property("boolean", False),
        "gpu_memory_utilization": Property("number", 0.8),
        "enable_chunked_prefill": Property("boolean", False),
        "max_response_length": Property("integer", 2048),
        "n_generation": Property("integer", 16),
        "n_generation_to_batch": Property("boolean", False),
        "batch_size": Property("integer", 1),
        "quantization": Property("string", "none"),
        "seed": Property("integer | null", None),
        "sampling_config": Property("SamplingConfig"),
        "vllm_use_flashinfer": Property("boolean", False),
        "backend": Property("string", "vllm"),
        "multi_turn_config": Property("MultiTurnRolloutConfig"),
    },
    "RolloutParallelismConfig": {
        "n_init_replicas": Property("integer", 1),
        "tp_size": Property("integer", 2),
        "cp_size": Property("integer", 1),
        "ep_size": Property("integer", 1),
        "dp_shard_size": Property("integer", -1),
        "pp_size": Property("integer", 1),
        "pp_dynamic_shape": Property("boolean", False),
        "pp_micro_batch_size": Property("integer", 1),
        "dp_replicate_size": Property("integer", 1),
    },
    "SFTDataConfig": {
        "type": Property("string", "sft"),
        "dataset": Property("DatasetConfig"),
        "mini_batch": Property("integer", 2),
        "dataloader_shuffle": Property("boolean", True),
        "enable_dataset_cache": Property("boolean", False),
        "dataloader_num_workers": Property("integer", 0),
        "dataloader_prefetch_factor": Property("integer | null", None),
        "conversation_column_name": Property("string", "conversations"),
        "system_prompt": Property("string", ""),
        "balance_dp_token": Property("boolean", True),
    },
    "SamplingConfig": {
        "temperature": Property("number", 1.0),
        "top_p": Property("number", 1.0),
        "top_k": Property("integer", -1),
        "repetition_penalty": Property("number", 1.0),
        "use_flashinfer": Property("boolean", False),
    },
    "SubProfilerConfig": {
        "do_profile": Property("boolean", False),
        "active_steps": Property("integer", 1),
        "warmup_steps": Property("integer", 1),
        "wait_steps": Property("integer", 1),
        "rank_filter": Property("array of integer", []),
        "record_shape": Property("boolean", False),
        "profile_memory": Property("boolean", False),
        "with_stack": Property("boolean", False),
        "with_modules": Property("boolean", False),
    },
    "TrainingConfig": {
        "train_policy": Property("SFTDataConfig | GrpoConfig"),
        "optm_name": Property("string", "AdamW"),
        "optm_lr": Property("number | array of number", 1e-06),
        "optm_impl": Property("string | array of string", "fused"),
        "optm_weight_decay": Property("number", 0.01),
        "optm_betas": Property("array of number", [0.9, 0.999]),
        "optm_warmup_steps": Property("integer | number", 20),
        "optm_decay_ratio": Property("number | null", None),
        "optm_decay_type": Property("string | null", None),
        "optm_min_lr_factor": Property("number", 0.0),
        "optm_grad_norm_clip": Property("number", 1.0),
        "master_dtype": Property("string", "float32"),
        "param_dtype": Property("string", "bfloat16"),
        "transfer_dtype": Property("string", "None"),
        "fsdp_reduce_dtype": Property("string", "float32"),
        "fsdp_offload": Property("boolean", False),
        "fsdp_reshard_after_forward": Property("string", "default"),
        "train_batch_per_replica": Property("integer", 8),
        "fp8": Property("FP8Config"),
        "fp4": Property("FP4Config"),
        "ckpt": Property("CheckpointConfig"),
        "resume": Property("boolean | string", False),
        "epoch": Property("integer", 1),
        "output_dir": Property("string", "./outputs"),
        "timestamp": Property("string", ""),
        "epsilon": Property("number", 1e-06),
        "async_tp_enabled": Property("boolean", False),
        "compile": Property("boolean", True),
        "sync_weight_interval": Property("integer", 1),
        "deterministic": Property("boolean", False),
        "activation_offload": Property("boolean", False),
        "fa_version": Property("integer | null", None),
        "seed": Property("integer | null", None),
        "local_dataset": Property("boolean | null", True),
        "max_num_steps": Property("integer | null", None),
        "sequence_packing": Property("boolean", False),
    },
    "ValidationConfig": {
        "enable": Property("boolean", False),
        "freq": Property("integer", 20),
        "batch_size": Property("integer | null", None),
        "dataset": Property("DatasetConfig"),
        "temperature": Property("number", 0.0),
        "top_p": Property("number | null", None),
        "top_k": Property("integer | null", 1),
        "repetition_penalty": Property("number", 1.0),
        "n_generation": Property("integer", 1),
        "max_response_length": Property("integer | null", None),
        "reward_function": Property("string | array of string | object of number", {}),
    },
}
"""The page in its own order."""

PLACES: dict[str, tuple[str, ...]] = {
    "": ("Config",),
    "train": ("TrainingConfig",),
    "train.train_policy": ("GrpoConfig", "SFTDataConfig"),
    "train.train_policy.dataset": ("DatasetConfig",),
    "train.train_policy.overlong_reward": ("OverlongRewardConfig",),
    "train.ckpt": ("CheckpointConfig",),
    "train.fp8": ("FP8Config",),
    "train.fp4": ("FP4Config",),
    "policy": ("PolicyConfig",),
    "policy.parallelism": ("ParallelismConfig",),
    "policy.lora": ("LoraConfig",),
    "rollout": ("RolloutConfig",),
    "rollout.parallelism": ("RolloutParallelismConfig",),
    "rollout.sampling_config": ("SamplingConfig",),
    "rollout.multi_turn_config": ("MultiTurnRolloutConfig",),
    "logging": ("LoggingConfig",),
    "profiler": ("ProfilerConfig",),
    "profiler.sub_profiler_config": ("SubProfilerConfig",),
    "validation": ("ValidationConfig",),
    "validation.dataset": ("DatasetConfig",),
}


def published_keys() -> Iterator[str]:
    """The dotted key of every published property that is not a table, where it stands in our tree."""
    for place, sections in PLACES.items():
        for section in sections:
            for name, published in PUBLISHED[section].items():
                if not published.is_section:
                    yield f"{place}.{name}" if place else name
