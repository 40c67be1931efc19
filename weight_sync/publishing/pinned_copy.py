"""The tensors of one process in host memory, twice: as they were announced last, and as they are being published.

    take ──▶ taken ── complete ── encoded against announced ──▶ announce: the buffers change places
                  └── anything fails ──▶ forget: announced stays what it was

From a device that keeps a copy of what was announced (`device_copy`) only changes cross. They lie in the memory of
their tensor until `complete`, next to training, copies the announced tensor there and writes them over it.

Invariant: `announced` has the bits of the newest version that the controller knows of, whatever happened to
others meanwhile; so it is what a delta may be made against. Changes cross only where the device's copy has these bits
as well: after a snapshot that was not announced the next one crosses whole. Buffers are allocated once and written in
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weight_sync.layout import BLOCK
from weight_sync.publishing.device_copy import Changes, DeviceCopy
from weight_sync.publishing.host_arena import ALIGNMENT, HostArena

Tensors = dict[str, torch.Tensor]
Positions = npt.NDArray[np.int32]
_Integers = npt.NDArray[Any]


class PinnedCopy:
    """See the module's docstring. Takes twice the memory of the tensors, once without `keeps`.

    keeps: whether the announced version is kept, so that the next one can be a delta. on_device: keeps it on the
    device as well, as far as it has room there."""

    def __init__(self, *, keeps: bool, on_device: DeviceCopy | None = None) -> None:
        self.keeps = keeps
        self.taken: Tensors = {}
        """The snapshot, whole when `complete` has returned; whose it is while it is published is for the caller to
        say."""
        self.announced: Tensors | None = None
        """The newest version that was announced; None: there is none, or none is kept."""
        self.copied_bytes = 0
        """Bytes of the snapshot that were copied into host memory."""
        self._on_device = on_device or DeviceCopy()
        self._device_has_announced = False
        self._crossed: dict[str, Changes] = {}
        self._positions: dict[str, Positions] = {}
        self._arenas: dict[bool, HostArena] = {}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors as they are now, each dropped before the next is asked for.

        When it returns, comparisons and copies are done and the weights may change: all of them are on the current
        stream of each device, which is waited for. The caller has nothing else there but the step that came before.
        """
        compares, self._device_has_announced = self._device_has_announced, False
        self._crossed, self._positions, self.copied_bytes = {}, {}, 0
        devices: set[torch.device] = set()
        for name, tensor in tensors:
            held = self.taken.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = self.taken[name] = self._room(tensor)
            changes = self._on_device.exchange(name, tensor, compares=compares) if self.keeps else None
            if changes is None:
                held.copy_(tensor, non_blocking=True)
                self.copied_bytes += held.nbytes
            else:
                self._crossed[name] = _cross(changes, held)
                self.copied_bytes += changes.positions.nbytes + changes.values.nbytes
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
        for device in devices:  # not for other streams: a broadcast of weights may take half a minute
            torch.cuda.current_stream(device).synchronize()

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for a tensor, pinned where it is on a GPU."""
        pinned = tensor.device.type == "cuda"
        if pinned not in self._arenas:
            self._arenas[pinned] = HostArena(pinned=pinned)
        return self._arenas[pinned].tensor(tensor.shape, tensor.dtype)

    def complete(self, pool: Executor | None = None) -> None:
        """Make `taken` whole where only changes have crossed. May run next to training, and again.

        pool: threads that share the work; not the pool that this call itself runs in."""
        fills: list[_Fill] = []
        for name, crossed in self._crossed.items():
            assert self.announced is not None
            # They lie in the memory that is filled now.
            positions, values = crossed.positions.numpy().copy(), crossed.values.numpy().copy()
            self._positions[name] = positions
            target = _integers(self.taken[name], values.dtype)
            fills.append(_Fill(target, _integers(self.announced[name], values.dtype), positions, values))
        self._crossed = {}
        work = [(fill, start) for fill in fills for start in range(0, len(fill.target), BLOCK)]
        for _ in map(_fill, work) if pool is None else pool.map(_fill, work):
            pass

    def announce(self) -> None:
        """Take note that what was taken has been announced."""
        assert not self._crossed, "the snapshot is not complete"
        self._positions = {}
        if self.keeps:
            self.taken, self.announced = self.announced or {}, self.taken
            self._device_has_announced = True

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, announced and taken tensor of each. After `complete`."""
        assert self.announced is not None
        for name, tensor in self.taken.items():
            yield name, self.announced[name], tensor

    @property
    def positions(self) -> dict[str, Positions]:
        """Where `taken` differs from `announced`, ascending, of tensors that were compared on the device."""
        return self._positions


def _cross(changes: Changes, room: torch.Tensor) -> Changes:
    """Copy changes into the memory of their tensor: they take less than it has, and it is pinned."""
    bytes_there = room.view(-1).view(torch.uint8)
    start = -(-changes.positions.nbytes // ALIGNMENT) * ALIGNMENT
    positions = bytes_there[: changes.positions.nbytes].view(torch.int32)
    values = bytes_there[start : start + changes.values.nbytes].view(changes.values.dtype)
    positions.copy_(changes.positions, non_blocking=True)
    values.copy_(changes.values, non_blocking=True)
    return Changes(positions, values)


class _Fill(NamedTuple):
    """A tensor to be made of another and changes; flat integers, all of them."""

    target: _Integers
    source: _Integers
    positions: Positions
    values: _Integers


def _fill(work: tuple[_Fill, int]) -> None:
    """Fill one block, which stays in the cache in between."""
    (target, source, positions, values), start = work
    end = min(start + BLOCK, len(target))
    first, last = np.searchsorted(positions, (start, end))
    block = target[start:end]
    block[:] = source[start:end]
    block[positions[first:last] - start] = values[first:last]


def _integers(tensor: torch.Tensor, dtype: np.dtype[Any]) -> _Integers:
    """Return the elements of a contiguous tensor on the host as integers, a view."""
    array: _Integers = tensor.view(-1).view(torch.uint8).numpy().view(dtype)
    return array
