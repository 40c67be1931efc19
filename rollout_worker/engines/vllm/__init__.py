"""Generation by vLLM, in processes of its own.

`engine` implements the contract of `engines.base`; `arguments` maps configuration to vLLM's arguments
(pure); `adapter` is all that this side knows of vLLM's API. On vLLM's side of the process boundary, `plugin`
is its entry point, `transfer` loads weight versions and `proof` proves that they arrived. `environment` says
what vLLM's processes find in their environment, and ends them when the worker is gone.
"""

from rollout_worker.engines.vllm.engine import VllmEngine, build

__all__ = ["VllmEngine", "build"]
