"""Layers that compute from something other than their parameters as they are loaded, on small modules."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout_worker.engines.scatter import BITS
from rollout_worker.engines.vllm.proof import LoadTrace, unread
from weight_sync.delta.delta import TensorChange

pytestmark = pytest.mark.slow

EXPERTS, INTERMEDIATE, PADDED, HIDDEN = 3, 48, 64, 64
KINDS = [(torch.float32, "vec"), (torch.bfloat16, "vec"), (torch.bfloat16, "amx")]


class Experts(torch.nn.Module):
    """Gate and up projection of each expert in one parameter, padded as vLLM does on a CPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.full((EXPERTS, 2 * PADDED, HIDDEN), 7.0, dtype=dtype), False)

    def load_weights(self, pairs: object) -> None:
        for name, tensor in pairs:  # type: ignore[attr-defined]
            expert, half = (int(part) for part in name.split("."))
            self.w13_weight.data[expert].narrow(0, half * PADDED, INTERMEDIATE).copy_(tensor)

    def by_hand(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = torch.zeros_like(self.w13_weight)
        for expert, half in itertools.product(range(EXPERTS), range(2)):
            whole[expert, half * PADDED : half * PADDED + INTERMEDIATE] = tensors[f"{expert}.{half}"]
        return whole


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(BITS[tensor.itemsize])


def published(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = [f"{expert}.{half}" for expert in range(EXPERTS) for half in range(2)]
    return {name: torch.randn(INTERMEDIATE, HIDDEN, generator=generator).to(dtype) for name in names}


@pytest.mark.parametrize(("dtype", "isa"), KINDS, ids=lambda v: str(v).removeprefix("torch."))
def test_packed_experts_take_whole_versions_and_changes(dtype: torch.dtype, isa: str) -> None:
    """Against vLLM's packing of what was put together by hand, of all versions: whole, sparse, and dense changes."""
    from rollout_worker.engines.vllm.layers import Packed, _pack

    model, tensors = Experts(dtype), published(dtype, 1)
    packed = Packed("w13_weight", model.w13_weight, isa)
    for seed in (1, 2):  # the second load writes over packed weights
        tensors = published(dtype, seed)
        packed.open()
        trace = LoadTrace(model, {packed.name})
        with trace:
            model.load_weights(trace.given(tensors.items()))
        report = trace.report()
        assert (report.problems, unread([report])) == ([], [])
        assert packed.close() == []
        assert torch.equal(bits(model.w13_weight), bits(_pack(model.by_hand(tensors), isa)))
    served = trace.weight_map({packed.name: packed.order})
    newer, changes = published(dtype, 3), []
    for number, (name, tensor) in enumerate(tensors.items()):
        if number % 2:
            changes.append(TensorChange(name, dtype, tuple(tensor.shape), None, newer[name]))
            tensors[name] = newer[name]
        else:
            at = torch.arange(5, tensor.numel(), 7)
            changes.append(TensorChange(name, dtype, tuple(tensor.shape), at, newer[name].reshape(-1)[at]))
            tensors[name].view(-1)[at] = newer[name].reshape(-1)[at]
    assert served.patch(changes).apply() == []
    assert torch.equal(bits(model.w13_weight), bits(_pack(model.by_hand(tensors), isa)))
    for name, tensor in tensors.items():
        out = torch.empty(tensor.numel(), dtype=dtype)
        assert served.read(name, out)
        assert torch.equal(bits(out), bits(tensor).reshape(-1))


def test_what_was_left_out_of_packed_experts_is_padding_only_if_it_is_zero() -> None:
    from rollout_worker.engines.vllm.layers import Packed

    model, tensors = Experts(torch.float32), published(torch.float32, 1)
    packed = Packed("w13_weight", model.w13_weight, "vec")
    trace = LoadTrace(model, {packed.name})  # without `open`: the elements of before are there
    with trace:
        model.load_weights(trace.given(tensors.items()))
    assert "were not part of the published weights" in trace.report().problems[0]


def test_a_kernel_of_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_worker.engines.vllm import layers

    model = Experts(torch.float32)
    packed = layers.Packed("w13_weight", model.w13_weight, "vec")
    assert packed.order.numel() == 2 * PADDED * HIDDEN
    model.load_weights(published(torch.float32, 1).items())
    monkeypatch.setattr(layers, "_pack", lambda weights, isa: weights.flip(-1))
    assert "is packed otherwise" in packed.close()[0]
    layers._inverse.cache_clear()
    monkeypatch.setattr(layers, "_pack", lambda weights, isa: weights * 2)
    with pytest.raises(RuntimeError, match="does not only move elements"):
        _ = packed.order
    layers._inverse.cache_clear()
