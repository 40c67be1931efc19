"""The elements that deltas change, for engines that overwrite them in what they serve and for a host copy's bytes.

    for change in open_delta(root, piece).changes():
        parameter.view(-1)[change.positions] = change.values

Everything is proven before the first change is handed out: the manifest by the piece's hash, the files by the
manifest; each tensor's number of positions, their order and their bounds before the change of that tensor. Values
overwrite, so changes that were made before may be made again.

`apply_deltas` works on bytes, block-parallel, and hashes each resulting tensor once. Of several deltas in a row only
the last result of a tensor is hashed, and nothing that a later one stores whole is written at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from schema.wire.weights import Piece, TensorEntry, WeightManifest
from weight_sync.delta.codec import CodecError, apply, decode
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.layout import BLOCK, as_tensor, tensor_digest, torch_dtype
from weight_sync.manifest import Opened, open_piece
from weight_sync.stores import DirectoryStore

_Stored = tuple[TensorEntry, memoryview]


@dataclass(frozen=True, slots=True)
class TensorChange:
    """New values of one tensor. Tensors may be views of a mapped file: read them, never write them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    positions: torch.Tensor | None
    """[changed] int64, ascending, in the flattened tensor; None: every element is given."""
    values: torch.Tensor
    """[changed], or [all elements], of `dtype`."""


class Delta:
    """One verified delta: from the weights with the content hash `base` to those with `content_hash`."""

    def __init__(self, uri: str, opened: Opened) -> None:
        assert opened.manifest.base is not None, "open_piece opens no delta without a base"
        self.manifest: WeightManifest = opened.manifest
        self.base: str = opened.manifest.base
        self.content_hash = opened.manifest.content_hash
        self._uri, self._data = uri, opened.data

    def changes(self) -> Iterator[TensorChange]:
        """One change for each tensor that changed, decoded as it is asked for.

        Raises `NotReadableError` when sparse blocks are not what the manifest says of them."""
        for name, entry in self.manifest.tensors.items():
            dtype, shape = torch_dtype(entry.dtype, name), tuple(entry.shape)
            if entry.changed is None:
                yield TensorChange(name, dtype, shape, None, as_tensor(self._data[name], dtype, shape).view(-1))
            else:
                positions, values = self._sparse(name, dtype, math.prod(shape), entry.changed)
                yield TensorChange(name, dtype, shape, positions, values)

    def _sparse(
        self, name: str, dtype: torch.dtype, n_elements: int, changed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        unsigned = np.dtype(f"<u{dtype.itemsize}")
        try:
            blocks = list(decode(self._data[name], unsigned, n_elements))
        except CodecError as error:
            raise NotReadableError(f"tensor {name!r} of {self._uri} is damaged: {error}") from None
        positions = np.concatenate([np.empty(0, np.int64), *(block[0] for block in blocks)])
        values = np.concatenate([np.empty(0, unsigned), *(block[1] for block in blocks)])
        if len(positions) != changed or len(values) != changed:
            raise NotReadableError(
                f"tensor {name!r} of {self._uri} changes {len(positions)} elements, its manifest says {changed}"
            )
        return torch.from_numpy(positions), torch.from_numpy(values).view(dtype)


def open_delta(root: Path, piece: Piece) -> Delta:
    """Open a delta of a local directory store, and prove it.

    root: of the store. piece: the delta's, as the chain of a manifest names it.

    Raises `NotReadableError`: a file is missing, short, or not what its manifest says; `WeightError`: the manifest
    contradicts itself or is none of a delta."""
    return Delta(piece.uri, open_piece(DirectoryStore(root), piece, "delta"))


def open_chain(pieces: Sequence[tuple[Path, Piece]], base: str, content_hash: str) -> list[Delta]:
    """Open and prove deltas, oldest first, and that they follow each other.

    pieces: each with the root of the local store in which it lies. base: content hash of the weights that are.
    served. content_hash: of those that are requested.

    Raises `WeightError`: one is missing or damaged, or does not apply to what the one before leads to."""
    deltas, content = [], base
    for root, piece in pieces:
        delta = open_delta(root, piece)
        if delta.base != content:
            raise WeightError(f"{piece.uri} changes the weights {delta.base}, not {content}")
        content = delta.content_hash
        deltas.append(delta)
    if content != content_hash:
        raise WeightError(f"the changes lead to the weights {content}, not to {content_hash}")
    return deltas


# ---- over the bytes of tensors ------------------------------------------------------------------------------------


def apply_deltas(
    data: Mapping[str, memoryview], tensors: Mapping[str, TensorEntry], deltas: Sequence[Opened], pool: Executor
) -> dict[str, str | None]:
    """Write deltas over tensors, oldest first.

    data: bytes of all tensors, writable. tensors: their dtypes and shapes. pool: threads that share the work; not the
    pool that this call itself runs in.

    Returns:
        The hashes of the tensors that changed, as they are now; None where sparse blocks were damaged."""
    stored: dict[str, list[_Stored]] = {}
    for delta in deltas:
        for name, entry in delta.manifest.tensors.items():
            before = [] if entry.changed is None else stored.get(name, [])
            stored[name] = [*before, (entry, delta.data[name])]
    large = [name for name in stored if _elements(data[name], tensors[name]) > BLOCK]
    small = [name for name in stored if _elements(data[name], tensors[name]) <= BLOCK]
    hashes = dict(zip(small, pool.map(lambda n: _write(data[n], tensors[n], stored[n], None), small), strict=True))
    return hashes | {name: _write(data[name], tensors[name], stored[name], pool) for name in large}


def wrong_tensors(data: Mapping[str, memoryview], tensors: Mapping[str, TensorEntry], pool: Executor) -> list[str]:
    """Names of the tensors whose bytes do not have the hash of their entry."""

    def right(name: str) -> bool:
        return tensor_digest(data[name], _itemsize(tensors[name])).hex() == tensors[name].hash

    names = list(tensors)
    return [name for name, same in zip(names, pool.map(right, names), strict=True) if not same]


def _write(target: memoryview, entry: TensorEntry, stored: Sequence[_Stored], pool: Executor | None) -> str | None:
    """One tensor; its hash afterwards."""
    itemsize = _itemsize(entry)
    elements: npt.NDArray[Any] = np.frombuffer(target, f"<u{itemsize}")
    try:
        for i, (how, payload) in enumerate(stored):
            last = i == len(stored) - 1
            if how.changed is None:
                target[:] = payload
            elif last:
                return apply(payload, elements, pool).hex()
            else:
                for positions, values in decode(payload, elements.dtype, len(elements)):
                    elements[positions] = values
    except CodecError:
        return None
    return tensor_digest(target, itemsize).hex()


def _itemsize(entry: TensorEntry) -> int:
    return int(torch_dtype(entry.dtype, "").itemsize)


def _elements(data: memoryview, entry: TensorEntry) -> int:
    return len(data) // _itemsize(entry)
