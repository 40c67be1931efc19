"""The embedded engine: a transformers model decoded by a loop of our own, for machines without vLLM.

engine      the thread and its contract with the worker loop
scheduler   what to admit, and when an update interrupts: pure decisions
decoder     the running samples: admit, step, recompute
window      the key-value cache: rows aligned at one column;  views: how the model reads and writes it
routing     which experts were chosen
attention   the attention function;  sampler: logits to tokens, and when a sample ends
model       loading, self-test, weights;  settings: what it needs of the configuration
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout_worker.engines.transformers.engine import TransformersEngine
from rollout_worker.engines.transformers.settings import settings_of

if TYPE_CHECKING:
    from schema.config import Config

__all__ = ["TransformersEngine", "build"]


def build(config: Config, tokenizer: Any, eos_token_ids: frozenset[int]) -> TransformersEngine:
    """The engine of this configuration. Raises `EngineConfigError` for keys that only vLLM knows."""
    return TransformersEngine(settings_of(config), tokenizer, eos_token_ids)
