"""A line of publications, full and as deltas, and one host's copy of the newest: real stores, no trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from schema.wire.weights import ChainLink, Publication
from tests.weight_sync.helpers import publication_of
from weight_sync import DirectoryStore, HubNames
from weight_sync.host.host_copy import CopiedWeights, HostCopy
from weight_sync.lora import Publishes
from weight_sync.publishing.writer import after, assemble, finish, write_delta, write_full
from weight_sync.stores import version_name


def nudged(model: Any, seed: int, share: float = 0.02, size: float = 0.3) -> None:
    """Change some elements of each weight that trains in place, as a step at a small learning rate does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            hit = torch.rand(parameter.shape, generator=generator) < share
            noise = torch.randn(parameter.shape, generator=generator) * size * parameter.std().nan_to_num(1.0)
            parameter.add_(torch.where(hit, noise, 0.0).to(parameter.dtype))


class Versions:
    """Publishes a model's weights again and again, and hands them out as a host's copy does."""

    def __init__(self, root: Path, lora: Publishes = "merged") -> None:
        self._lora = lora
        self.store = DirectoryStore(root / "versions")
        (root / "copy").mkdir(parents=True)
        self.copy = HostCopy(root / "copy" / "shared", self.store)
        self._chain: list[ChainLink] = []
        self._begins = 0
        self._id = 0
        self._last: dict[str, torch.Tensor] = {}
        self._table: dict[str, Any] = {}

    def publish(self, model: Any, version: int, *, full: bool = False) -> Publication:
        """One more publication: the first is full, later ones are deltas unless asked otherwise."""
        tensors = {name: tensor.detach().clone() for name, tensor in HubNames(model, lora=self._lora).tensors()}
        full = full or not self._chain
        target = version_name(0, version, "")
        self._id += 1
        with self.store.stage(target) as stage:
            if full:
                part, base, self._chain, self._begins = write_full(stage, tensors.items()), None, [], self._id
            else:
                part = write_delta(stage, ((n, self._last[n], tensor) for n, tensor in tensors.items()))
                base = self._table
            manifest = assemble([part], version=version, timeline=0, base=base, chain=self._chain)
            done = finish(stage, target, manifest)
        self._table, self._last = after(base, part.tensors), tensors
        link = {"full": done.piece} if full else {"delta": done.piece}
        self._chain = [*self._chain, ChainLink(version=version, content_hash=done.content_hash, **link)]
        own = {"id": self._id, "begins": 0 if full else self._begins}
        return publication_of(done, version).model_copy(update=own)

    def fetched(self, publication: Publication) -> CopiedWeights:
        """What a replica hands to its engine."""
        return self.copy.advance(publication)

    def close(self) -> None:
        self.copy.close()
