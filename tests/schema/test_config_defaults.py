"""Names and defaults are those of the published cosmos-rl schema; every deviation is declared."""

from __future__ import annotations

from typing import Any

import pytest

from schema.config import (
    CheckpointConfig,
    Config,
    DatasetConfig,
    FP4Config,
    FP8Config,
    GrpoConfig,
    LoggingConfig,
    LoraConfig,
    MultiTurnRolloutConfig,
    OverlongRewardConfig,
    ParallelismConfig,
    PolicyConfig,
    ProfilerConfig,
    RolloutConfig,
    RolloutParallelismConfig,
    SamplingConfig,
    SFTDataConfig,
    SubProfilerConfig,
    TrainingConfig,
    ValidationConfig,
)
from schema.config.base import Section
from schema.config.deviations import DEVIATIONS
from schema.config.explain import all_fields, annotation_of

DATALOADER = {
    "mini_batch": 2,
    "dataloader_shuffle": True,
    "enable_dataset_cache": False,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
}
PARALLELISM = {
    "n_init_replicas": 1,
    "tp_size": 2,
    "cp_size": 1,
    "ep_size": 1,
    "pp_size": 1,
    "pp_dynamic_shape": False,
    "pp_micro_batch_size": 1,
    "dp_replicate_size": 1,
}
PUBLISHED: dict[type[Section], dict[str, Any]] = {
    CheckpointConfig: {
        "enable_checkpoint": False,
        "save_freq": 20,
        "save_freq_in_epoch": 0,
        "save_mode": "async",
        "max_keep": 5,
        "export_safetensors": True,
        "upload_hf": False,
        "hf_repo_name": "Comos-Reason1",
        "upload_s3": False,
        "s3_bucket": None,
        "s3_prefix": "outputs",
    },
    DatasetConfig: {"name": "", "subset": "", "revision": "", "split": "", "test_size": None},
    FP4Config: {"enable_fp4": False, "fp4_recipe": "dynamic_scaling", "quant_recipe": "rowwise"},
    FP8Config: {"enable_fp8": False, "fp8_recipe": "dynamic_scaling", "quant_recipe": "rowwise"},
    GrpoConfig: {
        **DATALOADER,
        "type": "grpo",
        "variant": "grpo",
        "dataloader_batch_size": 1,
        "prompt_column_name": "",
        "response_column_name": "",
        "reward_function": {"single_choice": 1.0},
        "filter_reward_metric": [],
        "temperature": 1.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "positive_nll_coef": None,
        "lower_bound_ratio": 3.0,
        "loss_type": "token-mean",
        "unbiased_loss_max_tokens": None,
        "unbiased_advantage": False,
        "kl_beta": 0.0,
        "aipo_rho": None,
        "mu_iterations": 1,
        "batch_size_per_optimize": None,
        "max_token_len_per_mini_batch": None,
        "entropy_coeff": 0.0,
        "allowed_outdated_steps": 4,
        "on_policy": False,
        "outdated_rollout_fetch_batch_size": 1,
        "min_filter_prefix_tokens": None,
        "max_retry_for_on_policy": 10,
        "reference_reset_interval": None,
        "reset_optimizer_with_reference": True,
        "balance_dp_token": False,
        "use_decoupled_loss": False,
        "behav_imp_weight_cap": None,
        "rollout_as_token_ids": False,
    },
    LoggingConfig: {"logger": ["console"], "project_name": "cosmos_rl", "experiment_name": None},
    LoraConfig: {
        "r": 8,
        "lora_alpha": 8.0,
        "lora_dropout": 0.0,
        "target_modules": None,
        "use_rslora": False,
        "modules_to_save": None,
        "alpha_pattern": None,
        "r_pattern": None,
        "init_lora_weights": True,
    },
    MultiTurnRolloutConfig: {
        "enable": False,
        "enable_tools": False,
        "enable_thinking": False,
        "custom_chat_template_path": None,
        "max_assistant_turns": 5,
        "add_generation_prompt": True,
        "continue_final_message": False,
    },
    OverlongRewardConfig: {"enable_overlong_penalty": False, "buffer_length": 4096, "penalty_factor": 1.0},
    ParallelismConfig: {**PARALLELISM, "dp_shard_size": 1},
    PolicyConfig: {
        "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct",
        "model_revision": None,
        "model_max_length": 4096,
        "model_gradient_checkpointing": True,
        "lora": None,
        "trainable_map": None,
        "enable_liger_kernel": False,
    },
    ProfilerConfig: {"enable_profiler": False, "enable_nsys": False},
    RolloutConfig: {
        "enforce_eager": True,
        "include_stop_str_in_output": False,
        "gpu_memory_utilization": 0.8,
        "enable_chunked_prefill": False,
        "max_response_length": 2048,
        "n_generation": 16,
        "n_generation_to_batch": False,
        "batch_size": 1,
        "quantization": "none",
        "seed": None,
        "vllm_use_flashinfer": False,
        "backend": "vllm",
    },
    RolloutParallelismConfig: {**PARALLELISM, "dp_shard_size": -1},
    SFTDataConfig: {
        **DATALOADER,
        "conversation_column_name": "conversations",
        "system_prompt": "",
        "balance_dp_token": True,
    },
    SamplingConfig: {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "use_flashinfer": False,
    },
    SubProfilerConfig: {
        "do_profile": False,
        "active_steps": 1,
        "warmup_steps": 1,
        "wait_steps": 1,
        "rank_filter": [],
        "record_shape": False,
        "profile_memory": False,
        "with_stack": False,
        "with_modules": False,
    },
    TrainingConfig: {
        "optm_name": "AdamW",
        "optm_lr": 1e-6,
        "optm_impl": "fused",
        "optm_weight_decay": 0.01,
        "optm_betas": [0.9, 0.999],
        "optm_warmup_steps": 20,
        "optm_decay_ratio": None,
        "optm_decay_type": None,
        "optm_min_lr_factor": 0.0,
        "optm_grad_norm_clip": 1.0,
        "master_dtype": "float32",
        "param_dtype": "bfloat16",
        "transfer_dtype": "None",
        "fsdp_reduce_dtype": "float32",
        "fsdp_offload": False,
        "fsdp_reshard_after_forward": "default",
        "train_batch_per_replica": 8,
        "resume": False,
        "epoch": 1,
        "output_dir": "./outputs",
        "timestamp": "",
        "epsilon": 1e-6,
        "async_tp_enabled": False,
        "compile": True,
        "sync_weight_interval": 1,
        "deterministic": False,
        "activation_offload": False,
        "fa_version": None,
        "seed": None,
        "local_dataset": True,
        "max_num_steps": None,
        "sequence_packing": False,
    },
    ValidationConfig: {
        "enable": False,
        "freq": 20,
        "batch_size": None,
        "temperature": 0.0,
        "top_p": None,
        "top_k": 1,
        "repetition_penalty": 1.0,
        "n_generation": 1,
        "max_response_length": None,
        "reward_function": {},
    },
}
SECTIONS = {
    "train.train_policy": GrpoConfig,
    "train.train_policy.dataset": DatasetConfig,
    "train.train_policy.overlong_reward": OverlongRewardConfig,
    "train": TrainingConfig,
    "train.ckpt": CheckpointConfig,
    "train.fp8": FP8Config,
    "train.fp4": FP4Config,
    "policy": PolicyConfig,
    "policy.parallelism": ParallelismConfig,
    "rollout": RolloutConfig,
    "rollout.parallelism": RolloutParallelismConfig,
    "rollout.sampling_config": SamplingConfig,
    "rollout.multi_turn_config": MultiTurnRolloutConfig,
    "logging": LoggingConfig,
    "profiler": ProfilerConfig,
    "profiler.sub_profiler_config": SubProfilerConfig,
    "validation": ValidationConfig,
    "validation.dataset": DatasetConfig,
}


@pytest.mark.parametrize("section", PUBLISHED, ids=lambda section: section.__name__)
def test_published_names_and_defaults_are_ours(section: type[Section]) -> None:
    ours = section(type="sft") if section is SFTDataConfig else section()
    prefix = next((name for name, found in SECTIONS.items() if found is section), section.__name__)
    for name, default in PUBLISHED[section].items():
        expected = default
        if f"{prefix}.{name}" in DEVIATIONS:
            assert DEVIATIONS[f"{prefix}.{name}"].theirs == default
            expected = DEVIATIONS[f"{prefix}.{name}"].ours
        value = getattr(ours, name)
        assert (type(value), value) == (type(expected), expected), name


def test_every_deviation_is_real_and_explained() -> None:
    config = Config()
    for key, deviation in DEVIATIONS.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == deviation.ours != deviation.theirs
        assert deviation.reason.endswith(".")


def test_sections_stand_where_they_were_published() -> None:
    config = Config()
    for key, section in SECTIONS.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        assert type(value) is section, key
    assert config.policy.lora is None
    assert config.custom == {}
    assert type(Config.model_validate({"policy": {"lora": {}}}).policy.lora) is LoraConfig


def test_every_key_says_what_it_is_for() -> None:
    for path in all_fields():
        section = annotation_of(path[:-1]) if path[:-1] else Config
        models = [section] if isinstance(section, type) else section.__args__
        for model in models:
            fields = getattr(getattr(model, "__origin__", model), "model_fields", {})
            if path[-1] in fields:
                assert (fields[path[-1]].description or "").strip().endswith("."), path


def test_defaults_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().train.epoch = 3  # type: ignore[misc]
    Config().custom["x"] = 1
    assert Config().custom == {}
