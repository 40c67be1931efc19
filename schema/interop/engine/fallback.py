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

from schema.config.availability import UNAVAILABLE, check_available
from schema.config.loading.explain import findings_of
from schema.config.root import Config
from schema.config.sections.unsupported import TABLE
from schema.interop.engine.keys import words

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
_ROLE_SPEED = {
    "offload",
    "mini_batch",
    "max_token_len_per_mini_batch",
    "fsdp_wrap_layers",
    "fsdp_wrap_min_params",
}

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
"""Of them, `train.ckpt.load_schedule` changes numbers only where the schedule is edited between two runs."""


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
