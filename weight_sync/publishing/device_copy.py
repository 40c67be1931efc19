"""A copy of what was published last on the device of the tensors, so that only changes cross to the host.

    tensor on the device ── compared with the copy, bit by bit ──▶ positions and new values ──▶ host
                        └── written over the copy

Elements are compared as integers, so NaN payloads and −0.0 are values like any other. A tensor crosses whole where
no copy is kept of it, where the changes would take more than `CROSSING_SHARE` of its bytes, and where
it is so small (`SMALLEST`) that copying it takes less time than launching a comparison and waiting for its count.

What it saves, by arithmetic: 1.5B parameters in bfloat16 are 3.0 GB, over PCIe 5 at 55 GB/s 56 ms of copying. At a
density of 1.1 % 17M positions and values are 0.1 GB, 2 ms; comparing reads and writes some 15 GB of the device's
memory at 3.3 TB/s, 5 ms; and for each of 170 tensors ten kernels are launched and a count is waited for, 100 µs,
17 ms. That is 24 ms instead of 56; and 6 ms instead of 32 for the 1.75 GB of a rank that owns an eighth of 7B.

What it costs: device memory, at most one `SHARE`th of all that the device has; tensors that find no room cross whole.
The rule depends on the model and the device alone, so a job that fits once fits every time. The publisher keeps no
copy on a device that trainer and engines share: there the memory is worth more than the pause.

Order on the device: everything is enqueued on the current stream of the caller, behind the optimizer step whose
result is read and in front of whatever changes the weights next. A comparison waits for its count, and so for this
stream alone, never for the whole device. The copies to the host are not waited for here: see `PinnedCopy.take`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weight_sync.publishing.host_arena import ALIGNMENT

SHARE = 16
"""The copy may take one part in so many of the device's memory (`launcher.preflight.serving_memory` estimates it)."""
SMALLEST = 2**22
"""Bytes of a tensor below which it crosses whole: 76 µs at 55 GB/s."""
CROSSING_SHARE = 0.5
"""Share of a tensor's bytes that its changes may take: twice the time of crossing is less than scattering costs."""
CHUNK = 2**25
"""Elements that are compared at once: 32 MiB of flags, and at most 256 MiB of positions."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes(NamedTuple):
    """Elements of a tensor that changed.

    Attributes:
        positions: `[changed]` int32, ascending, in the flattened tensor. values: `[changed]` integers of the tensor's
        item size, the new bits.
    """

    positions: Tensor
    values: Tensor


def room_on(device: torch.device) -> int:
    """Return the bytes that a copy may take on a device: none on the CPU, where tensors need not cross."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory) // SHARE


def no_room(device: torch.device) -> int:
    """Return 0: no device keeps a copy."""
    return 0


class DeviceCopy:
    """See the module's docstring. For one thread at a time.

    room: bytes that it may take on a device. smallest: bytes of a tensor below which it is not kept; at least two
    lines of `HostArena`, so that changes fit where their tensor lies."""

    def __init__(self, room: Callable[[torch.device], int] = room_on, smallest: int = SMALLEST) -> None:
        self._room, self._smallest = room, max(smallest, 2 * ALIGNMENT)
        self._kept: dict[str, Tensor] = {}
        self.n_bytes = 0
        """Bytes that are kept."""

    def exchange(self, name: str, tensor: Tensor, *, compares: bool) -> Changes | None:
        """Keep the bits of a tensor in place of those that were kept under its name.

        compares: whether changes are of use. Returns the changes, on the device; None: the tensor crosses whole."""
        integers = _INTEGERS.get(tensor.dtype.itemsize)
        if integers is None or tensor.nbytes < self._smallest or tensor.numel() >= 2**31:
            return None
        bits = tensor.detach().contiguous().view(-1).view(integers)
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (bits.shape, bits.dtype, bits.device):
            self._keep(name, bits)
            return None
        changes = _changes(kept, bits) if compares else None
        kept.copy_(bits)
        return changes

    def _keep(self, name: str, bits: Tensor) -> None:
        """Keep a tensor for the first time, if there is room."""
        replaced = self._kept.pop(name, None)
        self.n_bytes += bits.nbytes - (0 if replaced is None else replaced.nbytes)
        if self.n_bytes > self._room(bits.device):
            self.n_bytes -= bits.nbytes
        else:
            self._kept[name] = bits.clone()


def _changes(old: Tensor, new: Tensor) -> Changes | None:
    """Compare two flat tensors of integers; None: there are too many changes."""
    most = int(CROSSING_SHARE * new.nbytes) // (4 + new.itemsize)
    found, count = [new.new_empty(0, dtype=torch.int32)], 0
    for start in range(0, len(new), CHUNK):
        # nonzero waits until its count is on the host: for the current stream, and nothing else
        positions = (old[start : start + CHUNK] != new[start : start + CHUNK]).nonzero().view(-1)
        count += len(positions)
        if count > most:
            return None
        found.append(positions.to(torch.int32).add_(start))
    positions = torch.cat(found)
    return Changes(positions, new.index_select(0, positions))
