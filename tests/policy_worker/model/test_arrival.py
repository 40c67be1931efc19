"""What a micro-batch is made of comes to a device in one copy, each tensor as it was."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from policy_worker.model.arrival import _in_one_copy, on_device
from policy_worker.model.logits.drawn import KeptSets, Reshaping
from policy_worker.model.micro_batch import BatchLayout, Mixtures, Segment, TrainSample, collate

TYPES = [torch.int64, torch.int32, torch.int16, torch.float32, torch.bool, torch.uint8, torch.float64]


@given(st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), max_size=9))
def test_each_tensor_arrives_as_it_was(described: list[tuple[torch.dtype, list[int]]]):
    tensors = [torch.arange(np.prod(shape)).reshape(shape).to(dtype) for dtype, shape in described]
    arrived = _in_one_copy(tensors, torch.device("cpu"))
    for tensor, again in zip(tensors, arrived, strict=True):
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)


class Crossings(TorchDispatchMode):
    """Counts what is copied from host memory to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        came = [tensor for tensor in args if isinstance(tensor, Tensor) and tensor.device.type == "cpu"]
        self.copies += bool(came) and isinstance(result, Tensor) and result.device.type == "meta"
        return result


def test_a_micro_batch_comes_in_one_copy():
    """With everything that it can have: blocks, what its tokens were drawn from, pieces, experts, and columns."""
    rng = np.random.default_rng(0)
    samples = []
    for n in (9, 7, 12):
        ids = np.concatenate([np.array([5, 6, 7, 8]), rng.integers(9, 60, n - 4)]).astype(np.int32)
        mask = (np.arange(n) >= 4).astype(np.uint8)
        sets = KeptSets(np.full(n - 4, 2, np.int32), np.stack([ids[4:], ids[4:] % 3], 1).reshape(-1).astype(np.int32))
        experts = rng.integers(0, 4, (n - 1, 2, 2)).astype(np.uint8), np.ones((n - 1, 2, 2), np.float32)
        segment = Segment(ids, mask, np.zeros(n, np.float32), sets, experts)
        samples.append(TrainSample([segment], held=np.array([2], np.int32)))
    reshaping = Reshaping(repetition=1.1, min_tokens=2, filters=True)
    columns = {"old": {row: torch.zeros(sample.learned_tokens) for row, sample in enumerate(samples)}}
    batches = []
    for device in ("cpu", "meta"):
        layout = BatchLayout(True, 61, device, 0.05, reshaping, pieces=2, mixtures=Mixtures(2, 4))
        with Crossings() as crossings:
            batches.append(collate(samples, range(3), layout, columns))
        assert crossings.copies == (device == "meta")
    here, there = batches
    assert there.blocks == here.blocks
    assert there.drawn is not None
    assert there.routing is not None
    moved = [getattr(there, field.name) for field in fields(there)]
    tensors = [value for value in moved if isinstance(value, Tensor)]
    tensors += [there.drawn.ids, there.drawn.kept_ids, there.routing.ids, *there.pieces, *there.columns.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert there.input_ids.shape == here.input_ids.shape


def test_what_is_on_the_device_stays():
    tensor = torch.zeros(3, device="meta")
    pair = {"there": tensor, "rows": [1, 2], "none": None}
    arrived = on_device(pair, "meta")
    assert arrived["there"] is tensor
    assert (arrived["rows"], arrived["none"]) == ([1, 2], None)
