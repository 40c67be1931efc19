"""Publishing: a version is written beside, one tensor in memory at a time, and then made visible by its name.

The name says which version of which timeline it is and ends in a random suffix, so a rewound timeline, a
second attempt or another process never overwrites what somebody may be reading.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from schema.wire.weights import FileEntry, TensorEntry, WeightManifest
from weight_sync.errors import WeightError
from weight_sync.layout import (
    DataFile,
    content_hash,
    digest,
    dtype_name,
    tensor_bytes,
    tensor_digest,
    torch_dtype,
)
from weight_sync.store import Stage, Store

MANIFEST = "manifest.json"
MAX_FILE_BYTES = 1 << 30
"""A data file ends before it grows beyond this: files of a gigabyte are verified and copied in parallel."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_VERSION = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9_-]*)\.)?t\d+-v\d{8,}-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Published:
    """What the controller is told about a version: the fields of `PublishRequest` that depend on it."""

    uri: str
    manifest_hash: str
    content_hash: str
    n_bytes: int


def version_name(timeline: int, version: int, name: str) -> str:
    """A new name for a stored version. Raises `ValueError` for a `name` that may not stand in a path."""
    if name and not _OWNER.fullmatch(name):
        raise ValueError(f"name {name!r} may hold only letters, digits, '-' and '_'")
    return f"{name + '.' if name else ''}t{timeline}-v{version:08d}-{secrets.token_hex(8)}"


def owner_of(version: str) -> str | None:
    """The `name` under which a version was published; None when it is not one of ours."""
    match = _VERSION.fullmatch(version)
    return None if match is None else match["name"] or ""


def publish(
    store: Store,
    *,
    version: int,
    timeline: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    name: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Published:
    """Store one full version.

    Args:
        store: where to. version: committed steps contained in the weights. timeline: of the job; together
        with `version` it becomes part of the stored name. tensors: names and tensors as in the hub
        checkpoint, aliases left out; read once, in order, each tensor
            dropped before the next is asked for. Any dtype of safetensors, any device, any strides.
        name: put in front of the stored name: the job, where several share a store.

    Raises:
        WeightError: a name twice, no tensors, an unsupported tensor, or the file system refuses.
        Whatever `tensors` raises. In each case nothing has become visible.
    """
    target = version_name(timeline, version, name)
    try:
        with store.stage(target) as stage:
            files, entries = _write_tensors(stage, tensors, max_file_bytes)
            manifest = WeightManifest(
                version=version,
                timeline=timeline,
                files=files,
                tensors=entries,
                content_hash=content_hash(entries),
            )
            text = manifest.model_dump_json().encode()
            with stage.create(MANIFEST) as stream:
                stream.write(text)
            stage.commit()
    except OSError as error:
        raise WeightError(f"version {target} cannot be written to {store!r}: {error}") from error
    return Published(
        uri=f"{target}/{MANIFEST}",
        manifest_hash=digest(text).hex(),
        content_hash=manifest.content_hash,
        n_bytes=sum(file.n_bytes for file in files),
    )


def _write_tensors(
    stage: Stage, tensors: Iterable[tuple[str, torch.Tensor]], max_file_bytes: int
) -> tuple[list[FileEntry], dict[str, TensorEntry]]:
    files: list[FileEntry] = []
    entries: dict[str, TensorEntry] = {}
    with ExitStack() as streams:
        current: DataFile | None = None
        for name, dtype, shape, data in _described(tensors):
            if name in entries:
                raise WeightError(f"tensor {name!r} was handed to publish twice")
            if current is None or not current.has_room(name, dtype, shape, len(data)):
                if current is not None:
                    files.append(current.finish())
                    streams.close()
                file = f"{len(files):05d}.safetensors"
                current = DataFile(streams.enter_context(stage.create(file)), file, max_file_bytes)
            value = tensor_digest(data, torch_dtype(dtype, name).itemsize)
            current.add(name, dtype, shape, data, value)
            entries[name] = TensorEntry(dtype=dtype, shape=shape, file=current.name, hash=value.hex())
        if current is None:
            raise WeightError("publish was handed no tensors")
        files.append(current.finish())
    return files, entries


def _described(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, str, list[int], memoryview]]:
    for name, tensor in tensors:
        if not name or name == "__metadata__":
            raise WeightError(f"{name!r} cannot be the name of a tensor")
        yield name, dtype_name(tensor.dtype, name), list(tensor.shape), tensor_bytes(name, tensor)
