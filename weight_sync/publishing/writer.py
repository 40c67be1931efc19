"""Publishing: a version is written under a temporary name, by one process or several, and then becomes visible.

    write_full / write_delta   each process its own tensors ─▶ Part
    assemble                   the parts of all ─▶ manifest
    finish                     manifest.json, commit

The name says which version of which timeline it is and ends in a random suffix, so a rewound timeline, a
second attempt or another process never overwrites what a replica may be reading.

In a delta each tensor that changed is stored as sparse blocks, or whole where those would take more than
`SPARSE_SHARE` of its bytes. The content hash is over all tensors whatever the form, so a full and a delta form of
one version have the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict

from schema.wire.weights import ChainLink, FileEntry, Piece, TensorEntry, WeightManifest
from weight_sync.delta import codec
from weight_sync.delta.codec import Encoded, bits_of, encode_each
from weight_sync.errors import WeightError
from weight_sync.layout import WeightFile, content_hash, digest, dtype_name, tensor_bytes, tensor_digest
from weight_sync.stores import MANIFEST, Stage, Store, version_name

MAX_FILE_BYTES = 1 << 30
"""A data file ends before it grows beyond this: files of a gigabyte are verified and copied in parallel."""
SPARSE_SHARE = 0.5
"""Share of a tensor's bytes: sparse blocks of more are not worth it. They save less than half of the transfer, and
their scattered writes cost a receiver about what it saves against one plain copy."""
DELTA_SHARE = 0.5
"""Share of a full version's bytes: a delta of more is published full instead, for the same reason, and as an anchor
that somebody will need anyway."""

Pair = tuple[str, torch.Tensor, torch.Tensor]
"""Name, tensor of the base, tensor of the new version: same dtype and shape."""
Positions = npt.NDArray[np.int32]
NOTHING_KNOWN: Mapping[str, Positions] = MappingProxyType({})
Table = Mapping[str, TensorEntry]
"""All tensors of a version, of which dtype, shape and hash count."""


class DenseError(WeightError):
    """A delta has grown beyond the bytes that it may have."""


class WrittenPart(BaseModel):
    """The part of a version that one process wrote, for the one that writes the manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    data_bytes: int = 0
    """Bytes that it stored of its tensors, without headers."""
    seconds: dict[str, float] = {}
    """By stage: "encode" (compare, compress, hash; of a delta as far as writing waited for it) and "write"."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its files, headers included."""
        return sum(file.n_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The facts of a version that the controller gets: the fields of `PublishRequest` that depend on it."""

    uri: str
    manifest_hash: str
    content_hash: str
    n_bytes: int
    kind: Literal["full", "delta"] = "full"

    @property
    def piece(self) -> Piece:
        """The version as a link of a chain names it."""
        return Piece(uri=self.uri, manifest_hash=self.manifest_hash, n_bytes=self.n_bytes)


# ---- one process ----------------------------------------------------------------------------------------------


def publish(
    store: Store,
    *,
    version: int,
    timeline: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    name: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> PublishedVersion:
    """Store one full version, from this process alone.

    store: where to. version: committed steps contained in the weights. timeline: of the job; together. with `version`
    it becomes part of the stored name. tensors: names and tensors as in the hub. checkpoint, aliases left out; read
    once, in order, each tensor dropped before the next is asked for. Any dtype of safetensors, any device, any
    strides. name: put in front of the stored name: the job, where several share a store.

    Raises:
        WeightError: a name twice, no tensors, an unsupported tensor, or the store refuses.
        Whatever `tensors` raises. In each case nothing has become visible."""
    target = version_name(timeline, version, name)
    try:
        with store.stage(target) as stage:
            part = write_full(stage, tensors, max_file_bytes=max_file_bytes)
            return finish(stage, target, assemble([part], version=version, timeline=timeline))
    except OSError as error:
        raise WeightError(f"version {target} cannot be written to {store!r}: {error}") from error


# ---- several processes ----------------------------------------------------------------------------------------


def write_full(
    stage: Stage,
    tensors: Iterable[tuple[str, torch.Tensor]],
    prefix: str = "",
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> WrittenPart:
    """Write tensors whole, one in memory at a time.

    stage: of the version. tensors: those of this process, read once and in order. prefix: of its files' names,
    different in each process.

    Raises `WeightError`: a name twice, or a tensor that safetensors cannot hold. `OSError`: the store refuses."""
    with _Writer(stage, prefix, max_file_bytes) as writer:
        for name, tensor in tensors:
            writer.whole(name, tensor)
        return writer.finish()


def write_delta(
    stage: Stage,
    pairs: Iterable[Pair],
    prefix: str = "",
    *,
    positions: Mapping[str, Positions] = NOTHING_KNOWN,
    max_file_bytes: int = MAX_FILE_BYTES,
    most_bytes: int | None = None,
    pool: Executor | None = None,
) -> WrittenPart:
    """Write what changed: nothing of tensors that are equal, the others sparse or whole.

    stage, prefix: as for `write_full`. pairs: this process's tensors, as they were and as they are, on the host.
    positions: where they differ, ascending, of tensors of which that is known: these are not compared.
    most_bytes: give up when the tensors take more. pool: where blocks are encoded in parallel, and ahead of what is
    written (`weight_sync.delta.codec.encode_each`).

    Raises `DenseError`: they take more than `most_bytes`. `WeightError`, `OSError`: as `write_full`."""
    drawn: deque[tuple[str, torch.Tensor]] = deque()

    def compared() -> Iterator[codec.Pair]:
        for name, old, new in pairs:
            if (pair := _pair_of(name, old, new, positions.get(name))) is not None:
                drawn.append((name, new))
                yield pair

    with _Writer(stage, prefix, max_file_bytes) as writer, closing(encode_each(compared(), pool)) as results:
        while True:
            began = time.monotonic()
            try:
                encoded = next(results)
            except StopIteration:
                return writer.finish()
            finally:
                writer.seconds["encode"] += time.monotonic() - began
            name, new = drawn.popleft()
            if encoded is None:
                writer.whole(name, new)
            elif encoded.changed:
                writer.changed(name, new, encoded)
            if most_bytes is not None and writer.n_bytes > most_bytes:
                raise DenseError(f"the changes take more than {most_bytes} bytes, already at tensor {name!r}")


def _pair_of(name: str, old: torch.Tensor, new: torch.Tensor, positions: Positions | None) -> codec.Pair | None:
    """Return two tensors as the codec takes them; None: nothing in them can have changed. Raises `WeightError`."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise WeightError(
            f"tensor {name!r} was {old.dtype} {list(old.shape)} and is {new.dtype} {list(new.shape)} now: a "
            f"delta keeps type and shape"
        )
    if new.numel() == 0 or (positions is not None and len(positions) == 0):
        return None
    dtype_name(new.dtype, name)
    size = new.dtype.itemsize
    before, now = bits_of(tensor_bytes(name, old), size), bits_of(tensor_bytes(name, new), size)
    return codec.Pair(before, now, int(SPARSE_SHARE * now.nbytes), positions)


def assemble(
    parts: Sequence[WrittenPart],
    *,
    version: int,
    timeline: int,
    base: Table | None = None,
    chain: Sequence[ChainLink] = (),
) -> WeightManifest:
    """The manifest of a version out of what all processes wrote.

    base: all tensors of the version that a delta applies to; None: the version is full. chain: the versions before
    it; the last link of a delta's is the base.

    Raises `WeightError`: processes wrote the same tensor or file, no tensors in a full version, or a delta's tensor
    is not one of the base."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise WeightError(f"tensor {twice[0]!r} was handed to publish twice, by two processes")
        tensors.update(part.tensors)
        for file in part.files:
            if file.name in files:
                raise WeightError(f"two processes wrote the file {file.name!r} of one version")
            files[file.name] = file
    if base is None and not tensors:
        raise WeightError("publish was handed no tensors")
    return WeightManifest(
        kind="full" if base is None else "delta",
        version=version,
        timeline=timeline,
        base=None if base is None else content_hash(base),
        files=list(files.values()),
        tensors=tensors,
        content_hash=content_hash(after(base, tensors)),
        chain=list(chain),
    )


def after(base: Table | None, tensors: Table) -> dict[str, TensorEntry]:
    """All tensors of a version out of those of its base (None: there is none) and those that it stores.

    Raises `WeightError` when one of them is none of the base's or of another type or shape."""
    if base is None:
        return dict(tensors)
    for name, entry in tensors.items():
        was = base.get(name)
        if was is None or (was.dtype, was.shape) != (entry.dtype, entry.shape):
            raise WeightError(f"tensor {name!r} of a delta is not one of its base, or of another type or shape")
    return {**base, **tensors}


def finish(stage: Stage, target: str, manifest: WeightManifest) -> PublishedVersion:
    """Write the manifest and make the version `target` visible. In the process that leads, when all have written.

    Raises `OSError` or `WeightError` when the store refuses; nothing is visible then."""
    text = manifest.model_dump_json().encode()
    with stage.create(MANIFEST) as stream:
        stream.write(text)
    stage.commit()
    return PublishedVersion(
        uri=f"{target}/{MANIFEST}",
        manifest_hash=digest(text).hex(),
        content_hash=manifest.content_hash,
        n_bytes=sum(file.n_bytes for file in manifest.files),
        kind=manifest.kind,
    )


class _Writer:
    """Data files of one process, one after the other."""

    def __init__(self, stage: Stage, prefix: str, max_file_bytes: int) -> None:
        self._stage, self._prefix, self._max_file_bytes = stage, prefix, max_file_bytes
        self._streams = ExitStack()
        self._file: WeightFile | None = None
        self._files: list[FileEntry] = []
        self._tensors: dict[str, TensorEntry] = {}
        self.seconds = {"encode": 0.0, "write": 0.0}
        self.n_bytes = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.__exit__(kind, error, trace)

    def whole(self, name: str, tensor: torch.Tensor) -> None:
        began = time.monotonic()
        dtype, data = dtype_name(tensor.dtype, name), tensor_bytes(name, tensor)
        value = tensor_digest(data, tensor.dtype.itemsize)
        self.seconds["encode"] += time.monotonic() - began
        self._add(name, dtype, list(tensor.shape), data, value)
        self._list(name, TensorEntry(dtype=dtype, shape=list(tensor.shape), file=self._name, hash=value.hex()))

    def changed(self, name: str, tensor: torch.Tensor, encoded: Encoded) -> None:
        data = memoryview(b"".join(encoded.parts))
        self._add(name, "U8", [len(data)], data, digest(data))
        entry = TensorEntry(
            dtype=dtype_name(tensor.dtype, name),
            shape=list(tensor.shape),
            file=self._name,
            hash=encoded.digest.hex(),
            changed=encoded.changed,
        )
        self._list(name, entry)

    def finish(self) -> WrittenPart:
        began = time.monotonic()
        self._close()
        self.seconds["write"] += time.monotonic() - began
        return WrittenPart(files=self._files, tensors=self._tensors, data_bytes=self.n_bytes, seconds=self.seconds)

    @property
    def _name(self) -> str:
        assert self._file is not None
        return self._file.name

    def _list(self, name: str, entry: TensorEntry) -> None:
        self._tensors[name] = entry

    def _add(self, name: str, dtype: str, shape: list[int], data: memoryview, value: bytes) -> None:
        began = time.monotonic()
        if not name or name == "__metadata__":
            raise WeightError(f"{name!r} cannot be the name of a tensor")
        if name in self._tensors:
            raise WeightError(f"tensor {name!r} was handed to publish twice")
        if self._file is None or not self._file.has_room(name, dtype, shape, len(data)):
            self._close()
            file = f"{self._prefix}{len(self._files):05d}.safetensors"
            stream = self._streams.enter_context(self._stage.create(file))
            self._file = WeightFile(stream, file, self._max_file_bytes)
        self._file.add(name, dtype, shape, data, value)
        self.n_bytes += len(data)
        self.seconds["write"] += time.monotonic() - began

    def _close(self) -> None:
        if self._file is not None:
            self._files.append(self._file.finish())
            self._file = None
            self._streams.close()


def changed_elements(tensors: Iterable[TensorEntry]) -> int:
    """Elements that a delta of these entries gives anew; of a tensor that it stores whole, all."""
    return sum(math.prod(entry.shape) if entry.changed is None else entry.changed for entry in tensors)
