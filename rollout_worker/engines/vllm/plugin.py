"""The entry point `vllm.general_plugins`: what vLLM runs in each of its processes before it builds an engine.

It must be harmless where vLLM runs without us, so it only adds a name to a registry there. In processes
started by our adapter it also imports `policy.external_modules`, ties their life to ours, and, on a CPU, makes
weights replaceable.
"""

from __future__ import annotations

import functools
import os

from rollout_worker.engines.vllm.arguments import TRANSFER_BACKEND
from rollout_worker.engines.vllm.processes import MODULES, PARENT, follow_parent
from schema.config.modules import import_external


@functools.cache
def register() -> None:
    """Called by vLLM, several times in some processes."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        TRANSFER_BACKEND, "rollout_worker.engines.vllm.transfer", "StoreWeightTransferEngine"
    )
    if PARENT in os.environ:
        import_external([name for name in os.environ.get(MODULES, "").split(",") if name])
        follow_parent()
        keep_cpu_weights_replaceable()


def keep_cpu_weights_replaceable() -> None:
    """On a CPU, let linear layers compute from their own weight instead of from a packed copy of it.

    vLLM's CPU build packs the weights of all linear layers after loading and drops (or, for tied embeddings,
    keeps next to it) the originals: later `load_weights` would fail half-way, or leave a tied output layer stale
    without an error. This replaces the one function that chooses the packing; nothing else is patched.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _plain_linear


def _plain_linear(layer: object, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[attr-defined]
