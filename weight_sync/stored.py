"""Tensors in safetensors files, of which any part can be read without the rest.

Files are mapped, and what was read of them leaves this process's memory again, block by block: a rank that reads its
part of a model needs that part and one block.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from schema.wire.frame import FrameError, read_header
from weight_sync.layout import size_of, torch_dtype
from weight_sync.publishing.gather import Box

BLOCK = 1 << 20
"""Numbers that are read, cast and compared at once, or one row where that has more."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    file: mmap.mmap
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A box of it, contiguous, in memory of its own."""
        made = torch.empty(box.sizes, dtype=dtype, device=device)
        self.read_into(made, box)
        return made

    def read_into(self, target: Tensor, box: Box) -> None:
        """Write a box of it over a tensor of the box's sizes, of any type and device."""
        target = target if box.sizes else target.view(1)
        bits = f"u{self.dtype.itemsize}"
        stored = np.ndarray(self.shape or (1,), bits, self.file, self.offset)[box.slices()]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing is written to it
            for rows in blocks(target.shape):
                target[rows].copy_(torch.from_numpy(stored[rows]).view(self.dtype))
                self.file.madvise(mmap.MADV_DONTNEED)  # what was read of it leaves this process's memory


def all_of(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Yield slices of the first dimension, one after the other."""
    rows = max(BLOCK // max(math.prod(shape[1:]), 1), 1)
    return (slice(start, start + rows) for start in range(0, shape[0], rows) if math.prod(shape))


def open_file(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The metadata of a file, and its tensors by name.

    Raises `OSError`, `ValueError`, `WeightError`: it cannot be read; of these FrameError: its header is wrong."""
    with path.open("rb") as stream:
        file = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with memoryview(file) as data:
        header = read_header(data)
    tensors = {}
    for name, entry in header.entries.items():
        dtype = torch_dtype(entry.dtype, name)
        if size_of(name, dtype, entry.shape) != entry.end - entry.start:
            raise FrameError(f"{name!r} has not the size of its shape in {path}")
        tensors[name] = StoredTensor(file, header.body + entry.start, entry.shape, dtype)
    return header.metadata, tensors


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of the files, by name. Raises as `open_file`."""
    return {name: tensor for path in files for name, tensor in open_file(path)[1].items()}
