"""The same payloads as `codec`, of tensors on a GPU: the device finds what changed.

    host (base)  ── blocks ──▶  device: compare, positions, values  ── what changed ──▶  host: compress, hash

A block of the base goes to the device, which is idle between steps; back come positions and values alone. The
host makes the new block out of them for its hash: nothing compares or copies a whole tensor there. Payload and
hash are bit for bit those of `codec.encode`.
"""

from __future__ import annotations

from concurrent.futures import Executor

import torch

from weight_sync.codec import Encoded, EncodedBlock, combine, each, pack
from weight_sync.layout import BLOCK, digest

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers for which every device can compare and gather; equal bits are equal in them as well."""


def encode(
    old: torch.Tensor, new: torch.Tensor, *, most_bytes: int | None = None, pool: Executor | None = None
) -> Encoded | None:
    """Compare two tensors of the same dtype and shape where `new` lies.

    Args:
        old: the base, on the host or any device. new: on any device; neither is changed.
        most_bytes, pool: as for `codec.encode`. Each thread has one block on the device at a time, of
            4 × itemsize + 10 MB.

    Returns:
        As `codec.encode`.
    """
    assert (old.dtype, old.shape) == (new.dtype, new.shape)
    before, now = _integers(old), _integers(new)

    def one(start: int) -> EncodedBlock:
        base, block = before[start : start + BLOCK], now[start : start + BLOCK]
        where = (base.to(block.device) != block).nonzero()[:, 0]
        positions, values = where.cpu().numpy(), block[where].cpu().numpy()
        result = base.to("cpu", copy=True).numpy()
        result[positions] = values
        return EncodedBlock(
            len(positions), pack(positions, values.view(f"<u{values.itemsize}")), digest(result.data)
        )

    return combine(each(one, range(0, now.numel(), BLOCK), pool), most_bytes)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers in C order, shape `[elements]`."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(_SIGNED[tensor.dtype.itemsize])
