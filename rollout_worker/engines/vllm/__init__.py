"""Generation by vLLM, in processes of its own.

`engine` implements the contract of `engines.base`; `arguments` maps configuration to vLLM's arguments
(pure); `adapter` is all that this side knows of vLLM's API; `reading` hashes the weights being served. On vLLM's
side of the process boundary, `plugin` is its entry point, `transfer` applies weight versions and `proof` proves that
they arrived. An engine over several machines is the first one's: `nodes` ties the others to it, and `follower` is
their process. `processes` says what vLLM's processes find in their environment, and ends them when the worker is
gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_worker.engines.vllm.engine import VllmEngine
    from schema.config import Config


def build(config: Config, tokenizer: Any, eos_token_ids: frozenset[int]) -> VllmEngine:
    """The engine of `rollout.backend = "vllm"`. vLLM finds stop strings by the tokenizer, which it loads of files.

    Raises:
        EngineConfigError: vLLM is not installed.
    """
    # Not above: vLLM's processes import this package for its plugin and need nothing of the engine.
    from rollout_worker.engines.vllm.engine import VllmEngine

    return VllmEngine(config, tokenizer, eos_token_ids)
