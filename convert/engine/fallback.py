"""Keys that change speed or memory but never numbers: where their part is not built, the nearest value.

Which keys those are stands here; what the build lacks is asked of `schema.config.availability`, so a
fallback vanishes by itself as soon as its part is built. Everything else (losses, schedules, widths of
parallelism) is always written faithfully, and `validate` names what cannot be done yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from convert.engine.keys import words
from schema.config.availability import UNAVAILABLE, check_available
from schema.config.loading.explain import findings_of
from schema.config.root import Config
from schema.config.sections.unsupported import TABLE

_MODEL_SPEED = words(
    "model_gradient_checkpointing enable_liger_kernel moe_token_dispatcher moe_grouped_gemm "
    "moe_shared_expert_overlap parallelism.sequence_parallel parallelism.pp_dynamic_shape "
    "parallelism.pp_micro_batch_size"
)
_TRAINING_SPEED = words(
    "compile async_tp_enabled fa_version activation_offload fsdp_offload fsdp_gradient_offload "
    "optimizer_offload fsdp_reshard_after_forward fsdp_wrap_layers fsdp_wrap_min_params overlap_grad_reduce "
    "recompute_granularity recompute_moe_layers optm_impl"
)
_DATA_SPEED = words(
    "enable_dataset_cache dataloader_num_workers dataloader_prefetch_factor dataloader_batch_size mini_batch "
    "max_token_len_per_mini_batch old_log_prob.mini_batch old_log_prob.max_token_len_per_mini_batch "
    "balance_dp_token"
)
_ROLE_SPEED = words("offload mini_batch max_token_len_per_mini_batch fsdp_wrap_layers fsdp_wrap_min_params")

SPEED_ONLY: frozenset[str] = frozenset(
    {f"policy.{key}" for key in _MODEL_SPEED}
    | {f"train.{key}" for key in _TRAINING_SPEED}
    | {f"train.train_policy.{key}" for key in _DATA_SPEED}
    | {f"reference.{key}" for key in (*_ROLE_SPEED, "parallelism.sequence_parallel")}
    | {f"reward_model.{key}" for key in _ROLE_SPEED}
    | {f"critic.{key}" for key in (*_MODEL_SPEED, *_TRAINING_SPEED, *_DATA_SPEED)}
    | {
        *words(
            "train.ckpt.save_mode train.ckpt.save_contents train.ckpt.load_contents train.ckpt.load_schedule "
            "train.ckpt.delete_after_load rollout.vllm_use_flashinfer rollout.sampling_config.use_flashinfer "
            "placement.share weight_sync.encoding weight_sync.transport logging.logger "
            "logging.log_validation_samples"
        )
    }
)
"""`train.ckpt.load_schedule` among them changes numbers only where the schedule is edited between two runs."""


MEGATRON_SPEED = words(
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split apply_rope_fusion "
    "async_tensor_model_parallel_allreduce batch_p2p_comm batch_p2p_sync bias_activation_fusion "
    "bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion cpu_offloading cpu_offloading_num_layers "
    "cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_scope "
    "deallocate_pipeline_outputs defer_embedding_wgrad_compute distribute_saved_activations enable_cuda_graph "
    "external_cuda_graph fine_grained_activation_offloading fused_single_qkv_rope gradient_accumulation_fusion "
    "masked_softmax_fusion memory_efficient_layer_norm mla_yarn_rope_fusion moe_deepep_num_sms "
    "moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms moe_layer_recompute "
    "moe_per_layer_logging moe_permute_fusion moe_router_dtype moe_router_fusion moe_use_legacy_grouped_gemm "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage offload_modules "
    "overlap_moe_expert_parallel_comm overlap_p2p_comm persist_layer_norm pipeline_model_parallel_layout "
    "tp_comm_overlap use_flash_attn use_naive_l2norm use_te_rng_tracker variable_seq_lengths"
)
"""Names in Megatron's configuration of a model that change speed, memory or rounding alone, as far as no key of ours
has their part."""


_SWITCHES = {
    "critic.": ("critic.enable",),
    "reward_model.": ("reward_model.enable",),
    "reference.": ("train.train_policy.kl_beta", "train.train_policy.kl_in_reward.beta"),
}
"""A role that is asked for and not built at all is refused as such: its keys stay as they are meant."""


def nearest(config: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Our key -> (nearest value that this build can do, what it lacks), for a converted configuration.

    Only keys of SPEED_ONLY that this build lacks, written or by our own default; a value of None
    means to leave the key out.
    """
    sound = _sound(config)
    if sound is None:
        return {}
    refused = {problem.key for problem in check_available(sound)}
    missing_roles = tuple(role for role, switches in _SWITCHES.items() if refused & set(switches))
    return {
        key: (UNAVAILABLE[key].neutral[0], UNAVAILABLE[key].missing)
        for key in sorted(refused & SPEED_ONLY)
        if key in UNAVAILABLE and not key.startswith(missing_roles)
    }


def _sound(config: Mapping[str, Any]) -> Config | None:
    """The configuration without the keys that pydantic refuses, so that the rest can be judged."""
    data: dict[str, Any] = deepcopy({key: value for key, value in config.items() if key != TABLE})
    for _ in range(8):  # each round removes every fault of the round before; tags can reveal new ones
        try:
            return Config.model_validate(data)
        except ValidationError as error:
            for path, _problem in findings_of(error, data):
                _remove(data, tuple(path))
    return None


def _remove(data: dict[str, Any], path: tuple[str | int, ...]) -> None:
    table: Any = data
    for index, part in enumerate(path):
        if not isinstance(table, dict) or part not in table:
            return
        following = path[index + 1] if index + 1 < len(path) else None
        if following is None or isinstance(following, int):
            del table[part]
            return
        table = table[part]
