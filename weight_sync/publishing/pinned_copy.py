"""The tensors of one process in host memory, twice: as they were announced last, and as they are being published.

    take ──▶ taken ── encoded against announced ──▶ announce: the buffers change places
                  └── anything fails ──▶ forget: announced stays what it was

Invariant: `announced` has the bits of the newest version that the controller knows of, whatever happened to
others meanwhile; so it is what a delta may be made against. Buffers are allocated once and written in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from weight_sync.publishing.host_arena import HostArena

Tensors = dict[str, torch.Tensor]


class PinnedCopy:
    """See the module's docstring. Takes twice the memory of the tensors, once without `keeps`.

    keeps: whether the announced version is kept, so that the next one can be a delta."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.taken: Tensors = {}
        """The snapshot; whose it is while it is published is for the caller to say."""
        self.announced: Tensors | None = None
        """The newest version that was announced; None: there is none, or none is kept."""
        self._arenas: dict[bool, HostArena] = {}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors as they are now, each dropped before the next is asked for. Complete when it returns."""
        devices: set[torch.device] = set()
        for name, tensor in tensors:
            held = self.taken.get(name)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = self.taken[name] = self._room(tensor)
            held.copy_(tensor, non_blocking=True)
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

    def announce(self) -> None:
        """Take note that what was taken has been announced."""
        if self.keeps:
            self.taken, self.announced = self.announced or {}, self.taken

    def pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, announced and taken tensor of each."""
        assert self.announced is not None
        for name, tensor in self.taken.items():
            yield name, self.announced[name], tensor
