"""Tensors that leave their device for a while: their bytes go to host memory, and come back to the same tensors.

The storage of a tensor is emptied in place, so every view of it (the shards of FSDP2, tied weights, the flat state of
an optimizer) is right again when it is filled, and nothing has to know who else has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

HOST = "cpu"


class Parked:
    """Tensors away from their device until `restore`. stays: kind of the device whose tensors are left alone."""

    def __init__(self, tensors: Iterable[torch.Tensor], stays: str = HOST) -> None:
        storages = {
            storage.data_ptr(): storage
            for tensor in tensors
            for part in _parts(tensor)
            if (storage := part.untyped_storage()).nbytes() and storage.device.type != stays
        }
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            size, pinned = storage.nbytes(), storage.device.type == "cuda"
            copy = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
            copy.copy_(storage, non_blocking=False)
            storage.resize_(0)
            self._kept.append((storage, copy))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # else it stays with this process

    def restore(self) -> None:
        """Every tensor has its bytes again, on its own device."""
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy, non_blocking=False)
        self._kept = []


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor (sharded, quantised) consists of."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # and not the mesh of a shard
            yield from _parts(part)
