"""Inference engines behind one contract (`engines.base`), chosen by `rollout.backend`.

The module of an engine is named as in `schema.config.backends` and has a function `build(config, tokenizer,
eos_token_ids) -> Engine`. It is imported when its engine is chosen, so that a machine needs only the engine it uses.

Common to them: `scatter` (where published tensors lie in parameters, and writing what changed there) and `checksum`
(the content hash of what is served).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollout_worker.engines.base import Engine, EngineConfigError
from schema.config.backends import BACKENDS
from schema.util.imports import without_collections

if TYPE_CHECKING:
    from schema.config import Config


def create_engine(config: Config, tokenizer: Any, eos_token_ids: frozenset[int]) -> Engine:
    """The engine of `rollout.backend`, not started yet.

    `tokenizer` is the model's (a transformers fast tokenizer), `eos_token_ids` end a sample unless its
    settings say `ignore_eos`. Raises `EngineConfigError` when the engine is not installed or
    refuses its settings.
    """
    backend = config.rollout.backend
    try:
        with without_collections():
            module = importlib.import_module(f"{__name__}.{backend}")
    except ImportError as error:
        other = next(name for name in BACKENDS if name != backend)
        raise EngineConfigError(
            f'rollout.backend = "{backend}" cannot be imported here ({error}): install the extra that brings '
            f'it, or set rollout.backend = "{other}"'
        ) from error
    engine: Engine = module.build(config, tokenizer, eos_token_ids)
    return engine
