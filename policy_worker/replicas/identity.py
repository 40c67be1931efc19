"""By what policy replicas find out that they are alike: the bits of their weights, and of what kind they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from policy_worker.memory.offload import local_of
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.model import TrainedModel

PIECE = 1 << 22
"""Numbers of weights that are summed at once."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Identity:
    """Fingerprints of a replica's trained models. All ranks call alike."""

    def __init__(self, group: RankGroup, trained: Sequence[TrainedModel]) -> None:
        self._group, self._trained = group, trained
        self.known = (-1, "")
        """A step, and the checksum of the weights before it."""

    def weights_before(self, step: int) -> str:
        """The checksum of the weights before a step, which are the present ones. A collective."""
        if self.known[0] != step:
            self.known = step, self.weights()
        return self.known[1]

    def weights(self) -> str:
        """A checksum of the present weights. A collective."""
        parameters = chain(*(trained.optimizer.parameters for trained in self._trained))
        digest = checksum(local_of(parameter) for parameter in parameters)
        return hashlib.blake2b("".join(self._group.gather(digest)).encode(), digest_size=16).hexdigest()

    def kind(self) -> dict[str, str]:
        """Describe what all replicas that train together have in common. A collective."""
        models = [trained.model for trained in self._trained]
        named = [(name, tuple(p.shape), str(p.dtype)) for model in models for name, p in model.named_parameters()]
        digests = self._group.gather(hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest())
        return {
            "code": _code(),
            "ranks": str(self._group.world),
            "mesh": str(self._group.sizes)[:256],
            "model": hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest(),
            "device": self._group.device.type,
        }


@torch.no_grad()
def checksum(tensors: Iterable[Tensor]) -> str:
    """Hash the bits of these tensors, in their order: for each the sum of its numbers, and the sum of these times
    their places, modulo 2^64."""
    sums: list[Tensor] = []
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(_WHOLE[tensor.element_size()])
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for start in range(0, len(bits), PIECE):
            piece = bits[start : start + PIECE].to(torch.int64)
            places = torch.arange(start + 1, start + 1 + len(piece), device=bits.device)
            total += torch.stack([piece.sum(), (piece * (2 * places + 1)).sum()])
        sums.append(total)
    numbers = torch.stack([total.cpu() for total in sums]).tolist() if sums else []
    return hashlib.blake2b(repr(numbers).encode(), digest_size=16).hexdigest()


def _code() -> str:
    """A digest of the code that decides what numbers a replica computes."""
    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=8)
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
