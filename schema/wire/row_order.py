"""Orders of rows that need no table of the whole stream: by a number of each row, equal ones shuffled by a key."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int32]


def ordered(numbers: npt.NDArray[np.floating], key: str) -> Order:
    """The indices of `numbers` from the smallest number to the largest, [n].

    key: equal ones are shuffled by it, the same way with every version of every library; "": they keep their order.
    """
    ties = _hashes(len(numbers), key) if key else np.arange(len(numbers), dtype=np.uint64)
    order: Order = np.lexsort((ties, numbers)).astype(np.int32)
    return order


def _hashes(n: int, key: str) -> npt.NDArray[np.uint64]:
    """A hash of each of the first n numbers under a key: SplitMix64 (Steele, Lea and Flood 2014)."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
