"""What one delta changes, for engines that overwrite elements of the weights they serve.

    for change in open_delta(root, piece).changes():
        parameter.view(-1)[change.positions] = change.values

Everything is proven before the first change is handed out: the manifest by the piece's hash, the files by the
manifest; each tensor's number of positions, their order and their bounds before the change of that tensor. Values
overwrite, so changes that were made before may be made again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from schema.wire.weights import Piece, WeightManifest
from weight_sync.delta.codec import CodecError, decode
from weight_sync.errors import NotReadableError
from weight_sync.layout import as_tensor, torch_dtype
from weight_sync.manifest import Opened, open_piece
from weight_sync.stores import DirectoryStore


@dataclass(frozen=True, slots=True)
class Change:
    """New values of one tensor. Tensors may be views of a mapped file: read them, never write them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
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
        self._uri, self._data = uri, opened.data

    @property
    def content_hash(self) -> str:
        return self.manifest.content_hash

    def changes(self) -> Iterator[Change]:
        """One change for each tensor that changed, decoded as it is asked for.

        Raises `NotReadableError` when sparse blocks are not what the manifest says of them.
        """
        for name, entry in self.manifest.tensors.items():
            dtype, shape = torch_dtype(entry.dtype, name), tuple(entry.shape)
            if entry.changed is None:
                yield Change(
                    name, dtype, shape, None, as_tensor(name, self._data[name], dtype, shape).view(-1)
                )
            else:
                positions, values = self._sparse(name, dtype, math.prod(shape), entry.changed)
                yield Change(name, dtype, shape, positions, values)

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

    Args:
        root: of the store. piece: the delta's, as the chain of a manifest names it.

    Raises:
        NotReadableError: a file is missing, short, or not what its manifest says.
        WeightError: the manifest contradicts itself or is none of a delta.
    """
    return Delta(piece.uri, open_piece(DirectoryStore(root), piece, "delta"))
