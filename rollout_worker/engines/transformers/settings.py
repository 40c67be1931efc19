"""The embedded engine's settings are taken from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout_worker.engines.base import EngineConfigError
from rollout_worker.engines.transformers import scheduler
from schema.config import Config
from schema.config.rules.engine import engine_can_do_it
from schema.config.sections.policy import LoraConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FILL_TOKENS = 8192
"""Tokens of one forward that fills the cache: large enough for full speed, small enough for memory."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Made by `settings_of`."""

    model_path: str
    revision: str | None
    load_format: str
    dtype: torch.dtype
    max_model_len: int
    slots: int
    capacity: int
    trust_remote_code: bool = False
    override: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the model's configuration that are replaced."""
    adapters: LoraConfig | None = None
    """The adapters whose weights alone are published, next to the model as it is loaded."""
    fill_tokens: int = FILL_TOKENS
    keep_cache: bool = False
    patience: float = scheduler.PATIENCE
    alone: bool = False
    """Whether each request is decoded by itself (`train.deterministic`)."""
    rows_alone: int = 1
    """The most samples of a request that are then decoded at once."""
    routing: str = "none"
    """`routing_replay`: what may be asked of the experts that were chosen."""


def settings_of(config: Config) -> EngineSettings:
    """Return what the configuration means to this engine. Raises `EngineConfigError`."""
    _refuse_foreign_keys(config)
    rollout = config.rollout
    alone = config.weight_sync.lora == "adapter" and not config.is_evaluation
    slots = rollout.max_num_seqs or rollout.max_concurrent_samples
    dtype = config.engine_dtype
    return EngineSettings(
        model_path=config.policy.model_name_or_path,
        revision=config.policy.model_revision,
        load_format=rollout.load_format,
        dtype=DTYPES[dtype],
        max_model_len=config.engine_max_len,
        slots=slots,
        capacity=rollout.max_concurrent_samples,
        trust_remote_code=config.policy.trust_remote_code,
        override=config.policy.override_config,
        adapters=config.policy.lora if alone else None,
        keep_cache=config.weight_sync.update_mode == "keep_kv",
        alone=config.train.deterministic,
        routing=config.grpo.routing_replay if config.replays_routing else "none",
        rows_alone=1 if rollout.n_generation_to_batch else min(slots, config.group_size),
    )


def _refuse_foreign_keys(config: Config) -> None:
    """Options that only vLLM has must be at their neutral values: a key acts or is refused."""
    problems = [*engine_can_do_it(config)]
    if problems:
        raise EngineConfigError("\n".join(problem.render() for problem in problems))
