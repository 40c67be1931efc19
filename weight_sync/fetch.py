"""Fetching: a version is proven byte by byte against its publication, and only then handed out.

    publication ──manifest_hash──▶ manifest.json ──hashes──▶ headers, tensors

What is missing, short or different is tried again for `patience` seconds, because a shared file system may
show a new directory late or in pieces; what can never become right (a manifest that contradicts itself, a
name that leaves the store) is an error at once. Tensors are views of memory-mapped files: all processes of a
host share one copy, and a version that is collected meanwhile stays readable for those who have it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from schema.wire.frame import FrameError, Header, read_header
from schema.wire.weights import FileEntry, Publication, TensorEntry, WeightManifest
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import as_tensor, content_hash, digest, file_hash, size_of, tensor_digest, torch_dtype
from weight_sync.store import DirectoryStore, Store, split_key

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds: attribute caches of NFS live 3 to 60 s by default; longer than this is a broken store."""
FIRST_PAUSE, MAX_PAUSE = 0.01, 0.5
HASH_THREADS = 4
"""One thread hashes 30 GB/s out of the page cache: more help only to keep a disk or network busy."""


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
        return as_tensor(name, self._data[name], torch_dtype(entry.dtype, name), entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors

    def __len__(self) -> int:
        return len(self.manifest.tensors)


def fetch(
    store: Store | str | os.PathLike[str], publication: Publication, *, patience: float = PATIENCE
) -> Weights:
    """Open and verify a published version. Blocks; call it from a thread where a loop must go on.

    Args:
        store: the store, or the root of a directory store.
        publication: as the controller handed it out; `uri` is a key of the store.
        patience: seconds for which unreadable or wrong files are tried again.

    Raises:
        WeightError: the version cannot be used; the message names file or tensor, and cause.
    """
    place = store if not isinstance(store, str | os.PathLike) else DirectoryStore(store)
    give_up, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return _fetch(place, publication)
        except NotReadableError as error:
            if time.monotonic() + pause > give_up:
                raise
            log.info("version %d is not readable yet, trying again: %s", publication.version, error)
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


def _fetch(store: Store, publication: Publication) -> Weights:
    version, _ = split_key(publication.uri)
    text = store.read(publication.uri)
    if digest(text).hex() != publication.manifest_hash:
        raise NotReadableError(f"{publication.uri} in {store!r} does not have the hash that was published")
    manifest = _checked_manifest(bytes(text), publication)
    with ThreadPoolExecutor(min(HASH_THREADS, len(manifest.files))) as pool:
        parts = pool.map(lambda file: _verified(store, version, file, manifest), manifest.files)
        found = {name: view for part in parts for name, view in part.items()}
    return Weights(store, publication, manifest, found)


def _checked_manifest(text: bytes, publication: Publication) -> WeightManifest:
    """The manifest, proven consistent with itself and with the publication."""
    uri = publication.uri
    try:
        manifest = WeightManifest.model_validate_json(text)
    except ValidationError as error:
        raise WeightError(f"{uri} is not a manifest that this build reads: {error}") from None
    n_bytes = sum(file.n_bytes for file in manifest.files)
    claims = (manifest.kind, manifest.version, manifest.timeline, manifest.content_hash, n_bytes)
    promise = (
        publication.kind,
        publication.version,
        publication.timeline,
        publication.content_hash,
        publication.n_bytes,
    )
    if claims != promise:
        raise WeightError(
            f"{uri} holds {claims}, published was {promise} (kind, version, timeline, content hash, bytes)"
        )
    names = [file.name for file in manifest.files]
    if not names or len(set(names)) != len(names):
        raise WeightError(f"{uri} names no data file, or one twice: {names}")
    for name, entry in manifest.tensors.items():
        if entry.file not in names:
            raise WeightError(f"{uri}: tensor {name!r} lies in {entry.file!r}, which is not a file of it")
        size_of(name, torch_dtype(entry.dtype, name), entry.shape)
    if content_hash(manifest.tensors) != manifest.content_hash:
        raise WeightError(f"{uri}: the content hash does not follow from its tensors")
    return manifest


def _verified(store: Store, version: str, file: FileEntry, manifest: WeightManifest) -> dict[str, memoryview]:
    """The tensors of one data file, every byte of it checked."""
    key = f"{version}/{file.name}"
    data = store.read(key)
    if len(data) != file.n_bytes:
        raise NotReadableError(f"{key} has {len(data)} bytes, its manifest says {file.n_bytes}")
    try:
        header = read_header(data)
    except FrameError as error:
        raise NotReadableError(f"{key} is damaged: {error}") from None
    expected = {name: entry for name, entry in manifest.tensors.items() if entry.file == file.name}
    _check_header(key, header, expected)
    found: dict[str, memoryview] = {}
    digests: list[bytes] = []
    # Several tensors may share an offset when they are empty; file order is then the order of the manifest.
    for name, entry in expected.items():
        place = header.entries[name]
        view = data[header.body + place.start : header.body + place.end]
        value = tensor_digest(view, torch_dtype(entry.dtype, name).itemsize)
        if value.hex() != entry.hash:
            raise NotReadableError(f"tensor {name!r} in {key} does not have the hash of its manifest")
        digests.append(value)
        found[name] = view
    if file_hash(data[: header.body], digests) != file.hash:
        raise NotReadableError(f"the header of {key} does not have the hash of its manifest")
    return found


def _check_header(key: str, header: Header, expected: Mapping[str, TensorEntry]) -> None:
    if header.entries.keys() != expected.keys():
        odd = sorted(header.entries.keys() ^ expected.keys())[:5]
        raise NotReadableError(f"{key} and its manifest differ in the tensors {odd}")
    for name, entry in expected.items():
        place = header.entries[name]
        size = size_of(name, torch_dtype(entry.dtype, name), entry.shape)
        if (place.dtype, list(place.shape), place.end - place.start) != (entry.dtype, entry.shape, size):
            raise NotReadableError(f"tensor {name!r} in {key} has not the type and shape of its manifest")
