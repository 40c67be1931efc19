"""Host memory for copies of tensors: as much as they take, and pinned where a device copies into it.

    a block    128 MiB of small tensors, each at a multiple of 64 bytes in the first block that has room
    its own    memory of a tensor of at least a quarter of a block, to the byte

PyTorch's pinned memory rounds each allocation up to a power of two: a fifth more than a model of 1.5B parameters has,
twice as much at worst. Here pageable memory is allocated, and the driver is asked to pin it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BLOCK_BYTES = 2**27
"""A quarter of it is what glibc's malloc takes pages of their own for, always: the driver pins pages, each once."""
OWN_PART = 4
ALIGNMENT = 64
"""Bytes; every dtype is aligned, and no two tensors share a line of the processor's cache."""
PORTABLE = 1
"""The flag `cudaHostRegisterPortable`: pinned for all contexts of the process."""


@dataclass
class _Block:
    """used: its first bytes, which belong to tensors."""

    memory: Tensor
    used: int = 0


class HostArena:
    """Memory that grows, and stays until the arena is gone. For one thread at a time.

    Tensors that outlive it keep their memory, and are pinned no more.

    pinned: whether the driver pins the memory: copies then run at bus speed and overlap with other work.
    block_bytes: a multiple of `ALIGNMENT`.
    """

    def __init__(self, *, pinned: bool, block_bytes: int = BLOCK_BYTES) -> None:
        self.reserved = 0
        """Bytes that were allocated."""
        self._pinned, self._block_bytes = pinned, block_bytes
        self._blocks: list[_Block] = []
        self._registered: list[Tensor] = []
        if pinned:
            weakref.finalize(self, _unregister, self._registered)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape, contiguous, with any content."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if OWN_PART * n_bytes >= self._block_bytes:
            return self._allocate(n_bytes).view(dtype).view(shape)
        block = next((block for block in self._blocks if block.used + n_bytes <= self._block_bytes), None)
        if block is None:
            block = _Block(self._allocate(self._block_bytes))
            self._blocks.append(block)
        start, end = block.used, block.used + n_bytes
        block.used = -(-end // ALIGNMENT) * ALIGNMENT
        return block.memory[start:end].view(dtype).view(shape)

    def _allocate(self, n_bytes: int) -> Tensor:
        memory = torch.empty(n_bytes, dtype=torch.uint8)
        self.reserved += n_bytes
        if self._pinned:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), n_bytes, PORTABLE))
            if code:
                _clear_error()
                log.warning(
                    "%d bytes of host memory cannot be pinned (CUDA error %d): copies are slower", n_bytes, code
                )
            else:
                self._registered.append(memory)
        return memory


def _clear_error() -> None:
    """Take back the error that CUDA remembers for this thread: PyTorch would raise it at the next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _unregister(memories: list[Tensor]) -> None:
    for memory in memories:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    memories.clear()
