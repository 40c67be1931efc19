"""Opening one stored form of a version: every byte of it is proven before any of it is used.

    manifest_hash ──▶ manifest.json ──hashes──▶ headers, whole tensors, sparse blocks

Data files are memory-mapped, so what is opened costs page cache and no memory of its own, and stays readable for
those who opened it when the version is collected. A full form proves its content hash as well; the result of a
delta is verified where it is applied (`weight_sync.host.host_copy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from schema.wire.frame import FrameError, Header, read_header
from schema.wire.weights import MAX_MANIFEST_BYTES, FileEntry, Piece, Publication, TensorEntry, WeightManifest
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import content_hash, digest, file_hash, size_of, tensor_digest, torch_dtype
from weight_sync.stores import ReadableStore, split_key

HASH_THREADS = 4
"""One thread hashes 30 GB/s out of the page cache: more help only to keep a disk or network busy."""

MOST_ELEMENTS = 2**59
"""Most elements of a tensor, lengths of 0 taken as 1: what torch can give a shape to, in any dtype."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A verified form: its manifest, and the stored bytes of each tensor (of a sparse one, its blocks)."""

    manifest: WeightManifest
    data: Mapping[str, memoryview]


def parse_manifest(text: bytes, piece: Piece) -> WeightManifest:
    """The manifest of a piece out of its bytes, proven by the piece's hash and consistent with itself.

    Raises `NotReadableError`: the bytes are not those that were announced; `WeightError`: it can never become right:
    another format, too large, or it contradicts itself."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise WeightError(f"{piece.uri} has {len(text)} bytes, a manifest has at most {MAX_MANIFEST_BYTES}")
    if digest(text).hex() != piece.manifest_hash:
        raise NotReadableError(f"{piece.uri} does not have the hash that was published")
    try:
        manifest = WeightManifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise WeightError(f"{piece.uri} is not a manifest that this build reads: {error}") from None
    _check_manifest(piece, manifest)
    return manifest


def open_piece(store: ReadableStore, piece: Piece, kind: Literal["full", "delta"]) -> Opened:
    """Open and prove one form of a version.

    Raises `NotReadableError`: a file is missing, short, or not what its manifest says; `WeightError`: the manifest
    contradicts itself or is of another kind."""
    manifest = parse_manifest(bytes(store.read(piece.uri)), piece)
    if manifest.kind != kind:
        raise WeightError(f"{piece.uri} is a {manifest.kind} version where a {kind} one was announced")
    version, _ = split_key(piece.uri)
    views: dict[str, memoryview] = {}
    if manifest.files:
        with ThreadPoolExecutor(min(HASH_THREADS, len(manifest.files))) as pool:
            for part in pool.map(lambda file: open_file(store, version, file, manifest), manifest.files):
                views.update(part)
    return Opened(manifest, {name: views[name] for name in manifest.tensors})


def piece_of(publication: Publication) -> Piece:
    """Return the piece that a publication announces. Raises `WeightError` when its URI is none of a store."""
    split_key(publication.uri)
    return Piece(uri=publication.uri, manifest_hash=publication.manifest_hash, n_bytes=publication.n_bytes)


def _check_manifest(piece: Piece, manifest: WeightManifest) -> None:
    uri, full = piece.uri, manifest.kind == "full"
    n_bytes = sum(file.n_bytes for file in manifest.files)
    if n_bytes != piece.n_bytes:
        raise WeightError(f"{uri} names files of {n_bytes} bytes, published was {piece.n_bytes}")
    names = [file.name for file in manifest.files]
    if (full and not names) or len(set(names)) != len(names):
        raise WeightError(f"{uri} names no data file, or one twice: {names}")
    if full != (manifest.base is None):
        raise WeightError(f"{uri}: a {manifest.kind} version with the base {manifest.base}")
    for name, entry in manifest.tensors.items():
        if entry.file not in names:
            raise WeightError(f"{uri}: tensor {name!r} lies in {entry.file!r}, which is not a file of it")
        size = size_of(name, torch_dtype(entry.dtype, name), entry.shape)
        if math.prod(max(length, 1) for length in entry.shape) > MOST_ELEMENTS:
            raise WeightError(f"{uri}: tensor {name!r} has the impossible shape {entry.shape}")
        if full and entry.changed is not None:
            raise WeightError(f"{uri}: tensor {name!r} of a full version is stored as sparse blocks")
        if entry.changed is not None and entry.changed * torch_dtype(entry.dtype, name).itemsize > size:
            raise WeightError(f"{uri}: tensor {name!r} has fewer elements than changed: {entry.changed}")
    if full and content_hash(manifest.tensors) != manifest.content_hash:
        raise WeightError(f"{uri}: the content hash does not follow from its tensors")


def open_file(store: ReadableStore, version: str, file: FileEntry, manifest: WeightManifest) -> dict[str, memoryview]:
    """The stored bytes of the tensors of one data file, every byte of it checked.

    version: the folder of the store in which it lies. Raises `NotReadableError`."""
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
    # Empty tensors share an offset with their neighbour, and their digests are equal then.
    order = sorted(expected, key=lambda name: (header.entries[name].start, header.entries[name].end))
    views: dict[str, memoryview] = {}
    digests: list[bytes] = []
    for name in order:
        entry, place = expected[name], header.entries[name]
        view = data[header.body + place.start : header.body + place.end]
        if entry.changed is None:
            value = tensor_digest(view, torch_dtype(entry.dtype, name).itemsize)
            if value.hex() != entry.hash:
                raise NotReadableError(f"tensor {name!r} in {key} does not have the hash of its manifest")
        else:
            value = digest(view)
        digests.append(value)
        views[name] = view
    if file_hash(data[: header.body], digests) != file.hash:
        raise NotReadableError(f"{key} does not have the hash of its manifest")
    return views


def _check_header(key: str, header: Header, expected: Mapping[str, TensorEntry]) -> None:
    if header.entries.keys() != expected.keys():
        odd = sorted(header.entries.keys() ^ expected.keys())[:5]
        raise NotReadableError(f"{key} and its manifest differ in the tensors {odd}")
    for name, entry in expected.items():
        place = header.entries[name]
        if entry.changed is None:
            size = size_of(name, torch_dtype(entry.dtype, name), entry.shape)
            promised = (entry.dtype, list(entry.shape), size)
        else:
            promised = ("U8", [place.end - place.start], place.end - place.start)
        if (place.dtype, list(place.shape), place.end - place.start) != promised:
            raise NotReadableError(f"tensor {name!r} in {key} has not the type and shape of its manifest")
