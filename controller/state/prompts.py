"""Which row of the prepared data stands at a position of a pass over the data.

Each pass goes through all rows once, in an order that is a pure function of (seed, pass, number of rows): a
keyed permutation without tables, so it costs no memory, survives every restart and never depends on the version
of a library. It is a balanced Feistel network over the next power of four, walked until the image is a row
("cycle walking", Black and Rogaway 2002).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from schema.wire.prompts import PromptFile

ROUNDS = 8
"""Four rounds are pseudo-random in theory for large domains; eight make small ones look shuffled too."""


class Permutation:
    """A bijection of range(n), keyed by `seed` and `data_pass`."""

    def __init__(self, n: int, seed: int, data_pass: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} elements")
        self._n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._keys = [
            hashlib.blake2b(f"{seed}/{data_pass}/{n}/{i}".encode(), digest_size=16).digest() for i in range(ROUNDS)
        ]

    def __call__(self, position: int) -> int:
        """The row at `position`; both in [0, n)."""
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} of {self._n}")
        value = self._encrypt(position)
        while value >= self._n:  # expected walks: at most 4, the domain is less than 4 n
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return (left << self._half) | right


class Prompts:
    """Prepared rows by pass and position."""

    def __init__(self, path: Path, *, seed: int, shuffle: bool) -> None:
        self._file = PromptFile(path)
        self._seed, self._shuffle = seed, shuffle
        self._permutation: tuple[int, Permutation] | None = None

    def __len__(self) -> int:
        return len(self._file)

    def row_index(self, data_pass: int, position: int) -> int:
        if not self._shuffle:
            return position
        if self._permutation is None or self._permutation[0] != data_pass:
            self._permutation = data_pass, Permutation(len(self), self._seed, data_pass)
        return self._permutation[1](position)

    def get(self, data_pass: int, position: int) -> tuple[list[int], dict[str, Any]]:
        """Prompt token ids and the dataset row for rewards."""
        index = self.row_index(data_pass, position)
        return self._file.token_ids(index).tolist(), self._file.row(index)
