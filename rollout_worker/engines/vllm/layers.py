"""Inside of vLLM's worker processes: layers that compute from something other than their parameters as loaded.

    plain     from the parameters themselves
    packed    from the same elements in the order of a kernel (experts on a CPU): in place, by the permutation
    derived   from copies of a parameter in another order (latent attention): copied again after each update
    rebuilt   from what is made of whole tensors (quantised layers, experts in a layout of a GPU's kernel): by vLLM's
              layerwise reload, with all of a version
    refused   anything else: `refused` names it

Packing is the trap: it keeps the shape, so a loader writes over packed experts without an error, and they compute
nonsense. `Packed` therefore begins with zeros, packs again and compares; `rebuilding` compares what a layer serves
with what was made last from tensors that `proof` has followed from the published ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from rollout_worker.engines.scatter import BITS
from rollout_worker.engines.vllm.proof import LoadTrace
from weight_sync.layout import tensor_bytes, tensor_digest

_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_PLAIN_EXPERTS = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON}
_REBUILT_EXPERTS = {
    UnquantizedMoeBackend.FLASHINFER_TRTLLM,
    UnquantizedMoeBackend.FLASHINFER_CUTLASS,
    UnquantizedMoeBackend.AITER,
}
_QUANTISED_ONLINE = "vllm.model_executor.layers.quantization.online."
"""Module of the methods that quantise published tensors as they are loaded."""


def refused(model: torch.nn.Module) -> list[str]:
    """Layers whose weights cannot be replaced, and why."""
    refusals = []
    for name, module in model.named_modules():
        method = _method(module)
        if method is not None and not (_is_plain(method) or _is_packed(method) or _is_rebuilt(method)):
            refusals.append(f"{name} ({_title(method)})")
        elif isinstance(module, MLAAttention) and not _is_derived(module):
            refusals.append(f"{name} (latent attention by {type(module.impl).__name__})")
        elif _drops_bias(getattr(module, "router", None)):
            refusals.append(f"{name} (the correction of its router's scores, which vLLM leaves out on a CPU)")
    return refusals


def _drops_bias(router: Any) -> bool:
    """Whether experts would be chosen without the bias that was loaded for it: seen in vLLM 0.32."""
    return (
        isinstance(router, CPURouter)
        and router.e_score_correction_bias is not None
        and not router.use_grouped_topk
        and router.scoring_func == "softmax"
        and router.custom_routing_function is None
    )


def mixtures(model: torch.nn.Module) -> list[int]:
    """Numbers of the layers that have experts, rising, as vLLM counts them where it returns what was chosen."""
    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({module.layer_id for module in model.modules() if isinstance(module, kinds)})


def rebuilt(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """By name, layers that are made anew of whole tensors."""
    return {
        name: module
        for name, module in model.named_modules()
        if (method := _method(module)) is not None and _is_rebuilt(method)
    }


def _method(module: torch.nn.Module) -> Any:
    return getattr(module, "quant_method", None)


def _title(method: Any) -> str:
    backend = getattr(method, "unquantized_backend", None)
    return type(method).__name__ if backend is None else f"experts of moe_backend {backend.value}"


def _is_plain(method: Any) -> bool:
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend in _PLAIN_EXPERTS
    return type(method).__name__ in _PLAIN_METHODS


def _is_packed(method: Any) -> bool:
    return isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend is UnquantizedMoeBackend.CPU


def _is_rebuilt(method: Any) -> bool:
    if isinstance(method, UnquantizedFusedMoEMethod):
        return method.unquantized_backend in _REBUILT_EXPERTS
    return type(method).__module__.startswith(_QUANTISED_ONLINE)


# ---- derived -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Derived:
    """The halves of a latent attention's projection, from which keys and values are decoded."""

    name: str
    layer: Any

    @property
    def parameters(self) -> list[str]:
        return [f"{self.name}.W_UK_T", f"{self.name}.W_UV"]

    def renew(self) -> list[str]:
        """Copy them from the projection. Returns what is wrong: halves that are not those of it."""
        layer = self.layer
        sizes = [layer.qk_nope_head_dim, layer.v_head_dim]
        rows = layer.kv_b_proj.weight.data.view(layer.num_heads, sum(sizes), layer.kv_lora_rank)
        keys, values = rows.split(sizes, dim=1)
        halves = {"W_UK_T": keys, "W_UV": values.transpose(1, 2)}
        for own, half in halves.items():
            getattr(layer, own).data.copy_(half)
        return [
            f"{self.name}.{own} is not a part of kv_b_proj.weight"
            for own, half in halves.items()
            if not torch.equal(getattr(layer, own), half)
        ]


def derived(model: torch.nn.Module) -> list[Derived]:
    """The latent attention of a model."""
    return [Derived(name, module) for name, module in model.named_modules() if isinstance(module, MLAAttention)]


def _is_derived(layer: Any) -> bool:
    """Whether both halves are plain copies; other kernels keep them packed or quantised."""
    plain = _is_plain(_method(layer.kv_b_proj)) and layer.kv_b_proj.weight.numel() > 0
    return plain and isinstance(layer.W_UK_T, torch.nn.Parameter) and isinstance(layer.W_UV, torch.nn.Parameter)


# ---- packed ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The weights of one layer's experts, [experts, rows, columns], each of which a CPU's kernel reads in its own
    order: always as packed but between `open` and `close`."""

    name: str
    parameter: torch.nn.Parameter
    isa: str

    @property
    def order(self) -> torch.Tensor:
        """[rows * columns] int64: where an expert's element lies; see `scatter.WeightSlot`."""
        _, rows, columns = self.parameter.shape
        return _inverse(rows, columns, self.parameter.dtype, self.isa)

    def open(self) -> None:
        """Zeros, for the loader to write over: what it leaves is padding."""
        self.parameter.data.zero_()

    def close(self) -> list[str]:
        """Pack what was loaded, in place. Returns what is wrong: experts that are not what was loaded."""
        loaded = self.parameter.data.clone()
        self.parameter.data.copy_(_pack(loaded, self.isa))
        bits = BITS[loaded.itemsize]
        for expert, packed in zip(loaded, self.parameter.data, strict=True):
            if not torch.equal(packed.reshape(-1).view(bits)[self.order], expert.reshape(-1).view(bits)):
                return [f"{self.name} is packed otherwise than its kernel's order says"]
        return []


def packed(model: torch.nn.Module) -> list[Packed]:
    """The packed weights of a model."""
    packed_weights = []
    for name, module in model.named_modules():
        method = _method(module)
        if method is not None and _is_packed(method):
            experts = method.moe_kernel.fused_experts
            if not experts._use_zentorch:  # which computes from the parameters
                packed_weights += [
                    Packed(f"{name}.{weight}", getattr(module, weight), experts.isa)
                    for weight in ("w13_weight", "w2_weight")
                ]
    return packed_weights


def _pack(weights: torch.Tensor, isa: str) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    result: torch.Tensor = cpu_prepack_moe_weight(weights, isa)
    return result


@functools.cache
def _inverse(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Found by packing the positions themselves, 15 bits at a time: packing only moves."""
    positions, bits = torch.arange(rows * columns), BITS[dtype.itemsize]
    order = torch.zeros_like(positions)
    for shift in range(0, 45, 15):
        digits = ((positions >> shift) & 0x7FFF).to(bits).view(dtype).reshape(1, rows, columns)
        order |= _pack(digits, isa).reshape(-1).view(bits).long() << shift
    sorted_positions, inverse = order.sort()
    if not torch.equal(sorted_positions, positions):
        raise RuntimeError(f"packing {rows} x {columns} for {isa} does not only move elements")
    return inverse


# ---- rebuilt -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rebuilding(
    layers: dict[str, torch.nn.Module], model_config: Any, trace: LoadTrace
) -> Iterator[Callable[[], list[str]]]:
    """Load inside of it, and each of the layers is made anew when its tensors are complete.

    Yields what compares, afterwards, what the layers serve with what was made; it returns what is wrong.
    """
    made: dict[str, str] = {}
    for layer in layers.values():
        initialize_layerwise_reload(layer)
    for name, layer in layers.items():
        _watch(name, layer, trace, made)
    try:
        yield lambda: [
            f"{name} is not served as it was made of the published tensors"
            for name, layer in layers.items()
            if made.get(name) != _digest(layer)
        ]
    finally:
        for layer in layers.values():
            with contextlib.suppress(AttributeError):
                del layer.quant_method.process_weights_after_loading
            finalize_layerwise_reload(layer, model_config)


def _watch(name: str, layer: Any, trace: LoadTrace, made: dict[str, str]) -> None:
    method = layer.quant_method
    process = method.process_weights_after_loading

    def watched(module: torch.nn.Module) -> None:
        trace.settle({f"{name}.{key}": value for key, value in module.named_parameters(recurse=False)})
        process(module)
        made[name] = _digest(module)

    method.process_weights_after_loading = watched


def digests(model: torch.nn.Module) -> dict[str, str]:
    """Return a digest of what each parameter holds."""
    return {name: _of(name, parameter) for name, parameter in model.named_parameters()}


def _digest(layer: torch.nn.Module) -> str:
    return " ".join(_of(name, value) for name, value in sorted(layer.named_parameters(recurse=False)))


def _of(name: str, parameter: torch.Tensor) -> str:
    return tensor_digest(tensor_bytes(name, parameter), parameter.itemsize).hex()
