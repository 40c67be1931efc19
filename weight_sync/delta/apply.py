"""Deltas written over the bytes of tensors, block-parallel, each resulting tensor hashed once.

Of several deltas in a row only the last result of a tensor is hashed, and nothing that a later one stores whole is
written at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from schema.wire.weights import TensorEntry
from weight_sync.delta.codec import CodecError, apply, decode
from weight_sync.layout import BLOCK, tensor_digest, torch_dtype
from weight_sync.manifest import Opened

_Stored = tuple[TensorEntry, memoryview]


def apply_deltas(
    data: Mapping[str, memoryview],
    tensors: Mapping[str, TensorEntry],
    deltas: Sequence[Opened],
    pool: Executor,
) -> dict[str, str | None]:
    """Write deltas over tensors, oldest first.

    Args:
        data: bytes of all tensors, writable. tensors: their dtypes and shapes.
        pool: threads that share the work; not the pool that this call itself runs in.

    Returns:
        The hashes of the tensors that changed, as they are now; None where sparse blocks were damaged.
    """
    stored: dict[str, list[_Stored]] = {}
    for delta in deltas:
        for name, entry in delta.manifest.tensors.items():
            before = [] if entry.changed is None else stored.get(name, [])
            stored[name] = [*before, (entry, delta.data[name])]
    large = [name for name in stored if _elements(data[name], tensors[name]) > BLOCK]
    small = [name for name in stored if _elements(data[name], tensors[name]) <= BLOCK]
    found = dict(
        zip(small, pool.map(lambda n: _write(data[n], tensors[n], stored[n], None), small), strict=True)
    )
    return found | {name: _write(data[name], tensors[name], stored[name], pool) for name in large}


def wrong_tensors(
    data: Mapping[str, memoryview], tensors: Mapping[str, TensorEntry], pool: Executor
) -> list[str]:
    """Names of the tensors whose bytes do not have the hash of their entry."""

    def right(name: str) -> bool:
        return tensor_digest(data[name], _itemsize(tensors[name])).hex() == tensors[name].hash

    names = list(tensors)
    return [name for name, same in zip(names, pool.map(right, names), strict=True) if not same]


def _write(
    target: memoryview, entry: TensorEntry, stored: Sequence[_Stored], pool: Executor | None
) -> str | None:
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
