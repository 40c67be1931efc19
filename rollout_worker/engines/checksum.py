"""The content hash of served weights, from tensors as an engine keeps them.

    kept as published                       hash of the kept bits
    kept in a type that holds every value   hash of the kept bits cast back
    kept in a type that loses bits          published tensor, cast, has the kept bits: hash of the published tensor

The last way needs the published tensors (the host's copy), so it says less: that served and published weights agree,
not that either is what the trainer has. `Checksum.exact` tells which it was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout_worker.engines.scatter import BITS, PublishedTensor
from schema.wire.weights import TensorEntry
from weight_sync.layout import content_hash, dtype_name, tensor_bytes, tensor_digest


class Tally:
    """Hashes of one version's tensors, added one by one."""

    def __init__(self, copy: Mapping[str, torch.Tensor] | None) -> None:
        """`copy`: the published tensors, where they can be had."""
        self._copy = copy
        self._entries: dict[str, TensorEntry] = {}
        self._unknown = False
        self.exact = True
        self.problems: list[str] = []

    def add(self, name: str, published: PublishedTensor, kept: torch.Tensor) -> None:
        """A tensor as the engine keeps it: [elements] or of its shape, on the CPU."""
        if loses_bits(published.dtype, kept.dtype):
            self.exact = False
            if self._copy is None:
                self._unknown = True
                return
            source = self._copy[name]
            right = torch.equal(_bits(source.to(kept.dtype)), _bits(kept))
            problem = "differs from the host's copy"
        else:
            source = _restored(kept, published.dtype)
            right = torch.equal(_bits(source.to(kept.dtype)), _bits(kept))
            problem = f"holds values that {published.dtype} does not have"
        if not right:
            self.problems.append(f"{name} {problem}")
        value = tensor_digest(tensor_bytes(name, source), source.itemsize)
        self._entries[name] = TensorEntry(
            dtype=dtype_name(published.dtype, name), shape=list(published.shape), file="served", hash=value.hex()
        )

    @property
    def content_hash(self) -> str | None:
        """Return the hash of what was added; None where a tensor could not be hashed, or is wrong."""
        return None if self._unknown or self.problems else content_hash(self._entries)


def loses_bits(published: torch.dtype, kept: torch.dtype) -> bool:
    """Whether some value of the published type cannot be kept."""
    if published is kept:
        return False
    if not (published.is_floating_point and kept.is_floating_point):
        return True
    a, b = torch.finfo(published), torch.finfo(kept)
    return bool(a.eps < b.eps or a.max > b.max or a.smallest_normal < b.smallest_normal)


def _restored(kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that was cast to `kept`."""
    if (dtype, kept.dtype) == (torch.bfloat16, torch.float32):
        # Its upper half; a cast would round, and give every NaN the same bits.
        return (kept.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return kept.to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    return flat.view(BITS[flat.itemsize])
