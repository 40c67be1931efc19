"""A job's publications as a trainer writes them: deltas with anchors between, and the weights of every version."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from schema.wire.weights import ChainLink, Publication, TensorEntry
from tests.weight_sync.helpers import all_bits, publication_of
from weight_sync.publishing.writer import (
    PublishedVersion,
    after,
    assemble,
    finish,
    version_name,
    write_delta,
    write_full,
)
from weight_sync.stores import DirectoryStore, Store

Tensors = dict[str, torch.Tensor]


def first_weights(seed: int = 0) -> Tensors:
    """Dtypes of several sizes, a scalar, an empty one, and one of more than a block."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "big.weight": torch.randn(1100, 1000, generator=generator).to(torch.bfloat16),
        "embed.weight": torch.randn(300, 64, generator=generator).to(torch.bfloat16),
        "layer.weight": torch.randn(64, 64, generator=generator),
        "layer.scale": torch.tensor(0.5),
        "empty": torch.empty(0, 4),
        "codes": torch.randint(0, 255, (999,), generator=generator, dtype=torch.uint8),
        "frozen": torch.arange(100, dtype=torch.int64),
    }


def stepped(weights: Mapping[str, torch.Tensor], step: int, share: float = 0.01) -> Tensors:
    """About `share` of the elements of each floating-point tensor anew; "layer.scale" always."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = {}
    for name, tensor in weights.items():
        new = tensor.clone()
        if new.is_floating_point() and new.dim():
            mask = torch.rand(new.shape, generator=generator) < share
            new[mask] = torch.randn(int(mask.sum()), generator=generator).to(new.dtype)
        found[name] = new
    found["layer.scale"] = torch.tensor(float(step))
    return found


class Versions:
    """Publishes `weights`, then `stepped` ones. Every `anchor_every`-th version has a full form beside its delta."""

    def __init__(
        self, root: Path, *, anchor_every: int = 4, weights: Tensors | None = None, store: Store | None = None
    ) -> None:
        self.root, self.anchor_every = root, anchor_every
        self.store: Store = DirectoryStore(root) if store is None else store
        self.weights: list[Tensors] = [first_weights() if weights is None else weights]
        self.publications: list[Publication] = []
        self.links: list[ChainLink] = []
        self._table: dict[str, TensorEntry] = {}
        published = self._full(0)
        self.links.append(ChainLink(version=0, content_hash=published.content_hash, full=published.piece))
        self._announce(published)

    @property
    def newest(self) -> Publication:
        return self.publications[-1]

    def next(self, weights: Tensors | None = None, *, full: bool = False, wrong: bool = False) -> Publication:
        """Publish one more version, as a delta unless `full`. wrong: it leaves a change out that its hashes claim."""
        version = len(self.weights)
        old = self.weights[-1]
        self.weights.append(stepped(old, version) if weights is None else weights)
        new = self.weights[-1]
        if full:
            self.links = []
            published = self._full(version)
            link = ChainLink(version=version, content_hash=published.content_hash, full=published.piece)
        else:
            target = version_name(0, version, "")
            with self.store.stage(target) as stage:
                if wrong:
                    missed = int((old["big.weight"] != new["big.weight"]).flatten().nonzero()[0])
                    old = {**old, "big.weight": old["big.weight"].clone()}
                    old["big.weight"].view(-1)[missed] = new["big.weight"].view(-1)[missed]
                part = write_delta(stage, [(name, old[name], new[name]) for name in new])
                manifest = assemble([part], version=version, timeline=0, base=self._table, chain=self.links)
                published = finish(stage, target, manifest)
            self._table = after(self._table, part.tensors)
            anchor = self._full(version).piece if version % self.anchor_every == 0 else None
            link = ChainLink(version=version, content_hash=published.content_hash, delta=published.piece, full=anchor)
        self.links.append(link)
        return self._announce(published)

    def folder(self, uri: str) -> Path:
        return self.root / uri.split("/", maxsplit=1)[0]

    def _full(self, version: int) -> PublishedVersion:
        target = version_name(0, version, "")
        with self.store.stage(target) as stage:
            part = write_full(stage, self.weights[version].items(), max_file_bytes=1 << 20)
            published = finish(stage, target, assemble([part], version=version, timeline=0))
        self._table = dict(part.tensors)
        return published

    def _announce(self, published: PublishedVersion) -> Publication:
        number = len(self.publications) + 1
        publication = publication_of(published, len(self.weights) - 1)
        self.publications.append(publication.model_copy(update={"id": number}))
        return self.newest


class RemoteStore(DirectoryStore):
    """A store whose files must be fetched: those of a directory, every access noted as a line of a file."""

    def __init__(self, root: Path, notes: Path) -> None:
        super().__init__(root)
        self._notes = notes
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path | None:  # type: ignore[override]
        return None

    def read(self, key: str) -> memoryview:
        self._note(key)
        return super().read(key)

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        self._note(key)
        return super().download(key, to, n_bytes)

    def accesses(self) -> list[str]:
        """Keys that any process has read or downloaded, in order."""
        return self._notes.read_text().split() if self._notes.exists() else []

    def _note(self, key: str) -> None:
        with self._lock, self._notes.open("a") as file:
            file.write(f"{key}\n")


def same(found: Any, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether pairs of names and tensors are these weights, bit by bit."""
    return all_bits(found) == all_bits(weights)
