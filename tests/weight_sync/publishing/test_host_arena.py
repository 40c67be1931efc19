"""Tensors of an arena have memory of their own, as much as they take and little more."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.publishing.host_arena import ALIGNMENT, HostArena

BLOCK = 1024
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(0, 20), max_size=3)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=30))
def test_no_two_tensors_share_a_byte_and_hardly_one_is_spare(wanted: list[tuple[list[int], torch.dtype]]):
    arena = HostArena(pinned=False, block_bytes=BLOCK)
    tensors = [arena.tensor(shape, dtype) for shape, dtype in wanted]
    spans = []
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert (list(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        tensor.fill_(number % 2)
        spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    filled = sorted(span for span in spans if span[0] != span[1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(filled))
    assert all(bool((tensor == number % 2).all()) for number, tensor in enumerate(tensors))
    small = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors if 4 * tensor.nbytes < BLOCK)
    large = sum(tensor.nbytes for tensor in tensors if 4 * tensor.nbytes >= BLOCK)
    blocks = (arena.reserved - large) // BLOCK
    assert arena.reserved == large + blocks * BLOCK
    assert blocks <= 4 * small // (3 * BLOCK) + 1, "three quarters of each block but the last are used"


def test_memory_of_a_model_is_not_rounded_up():
    """PyTorch's pinned memory would take a fifth more for a model of 1.5B parameters."""
    layer = [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960)]
    shapes = [(151_936, 1536), *(layer * 28), *([(1536,)] * 57)]
    arena = HostArena(pinned=False)  # which touches none of it
    sizes = [arena.tensor(shape, torch.bfloat16).nbytes for shape in shapes]
    rounded = sum(2 ** math.ceil(math.log2(size)) for size in sizes)
    assert sum(sizes) < arena.reserved < 1.07 * sum(sizes)
    assert rounded > 1.18 * sum(sizes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's driver pins memory")
def test_a_pinned_arena_is_pinned_while_it_lives():
    arena = HostArena(pinned=True)  # blocks of the usual size have pages of their own
    tensors = [arena.tensor((7, 5), torch.float32), arena.tensor((2**23,), torch.float32)]
    assert all(tensor.is_pinned() for tensor in tensors)
    del arena
    assert not any(tensor.is_pinned() for tensor in tensors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's driver pins memory")
def test_memory_that_cannot_be_pinned_is_slower_and_nothing_else(caplog: pytest.LogCaptureFixture):
    """The driver pins no page twice; what it says of that must not be raised by a later kernel."""
    arena = HostArena(pinned=True)
    large = arena.tensor((2**23,), torch.float32)
    assert int(torch.cuda.cudart().cudaHostUnregister(large.data_ptr())) == 0
    assert int(torch.cuda.cudart().cudaHostRegister(large.data_ptr(), large.nbytes, 1)) == 0
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: large.view(torch.uint8))
        arena.tensor((2**23,), torch.float32)
    assert torch.empty is empty
    assert "cannot be pinned" in caplog.text
    assert float(torch.ones(2, device="cuda").sum()) == 2.0
