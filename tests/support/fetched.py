"""A full version opened where it lies in the store, for tools: proven byte by byte, and only then handed out.

    publication ──manifest_hash──▶ manifest.json ──hashes──▶ headers, tensors

Replicas read the copy of their host instead (`host_copy`), which follows deltas. What is missing, short or different
is tried again for `patience` seconds, because a shared file system may show a new directory late or in pieces; what
can never become right (a manifest that contradicts itself, a name that leaves the store) is an error at once. Tensors
are views of memory-mapped files: a version that is collected meanwhile stays readable for those who have it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from schema.util.backoff import Backoff
from schema.wire.weights import Publication, WeightManifest
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import as_tensor, torch_dtype
from weight_sync.manifest import open_piece, piece_of
from weight_sync.stores import DirectoryStore, Store

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds: attribute caches of NFS live 3 to 60 s by default; longer than this is a broken store."""
BACKOFF = Backoff(0.01, 0.5)


@dataclass(frozen=True, slots=True)
class Weights:
    """A verified version. `tensors` and `[]` give views of the mapped files: copy before changing them."""

    store: Store
    publication: Publication
    manifest: WeightManifest
    _data: Mapping[str, memoryview]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All names and tensors, in the order in which they lie in the files."""
        for name in self.manifest.tensors:
            yield name, self[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self.manifest.tensors[name]
        return as_tensor(self._data[name], torch_dtype(entry.dtype, name), entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __len__(self) -> int:
        return len(self.manifest.tensors)


def fetch(store: Store | str | os.PathLike[str], publication: Publication, *, patience: float = PATIENCE) -> Weights:
    """Open and verify a published version. Blocks; call it from a thread where a loop must go on.

    Args:
        store: the store, or the root of a directory store.
        publication: as the controller handed it out; `uri` is a key of the store.
        patience: seconds for which unreadable or wrong files are tried again.

    Raises:
        WeightError: the version cannot be used; the message names file or tensor, and cause.
    """
    place = store if not isinstance(store, str | os.PathLike) else DirectoryStore(store)
    give_up = time.monotonic() + patience
    attempt = 0
    while True:
        attempt += 1
        try:
            return _fetch(place, publication)
        except NotReadableError as error:
            pause = BACKOFF.after(attempt)
            if time.monotonic() + pause > give_up:
                raise
            log.info("version %d is not readable yet, trying again: %s", publication.version, error)
        time.sleep(pause)


def _fetch(store: Store, publication: Publication) -> Weights:
    opened = open_piece(store, piece_of(publication), "full")
    manifest = opened.manifest
    claims = (manifest.version, manifest.timeline, manifest.content_hash)
    promise = (publication.version, publication.timeline, publication.content_hash)
    if claims != promise:
        raise WeightError(
            f"{publication.uri} holds {claims}, published was {promise} (version, timeline, content hash)"
        )
    return Weights(store, publication, manifest, opened.data)
