"""Which row of the prepared data stands at a position of a pass over the data, or over one of its sources.

Each pass goes through all its rows once, in an order that is a pure function of (seed, pass, number of rows): a
keyed permutation without tables, so it costs no memory, survives every restart and never depends on the version
of a library. It is a balanced Feistel network over the next power of four, walked until the image is a row
("cycle walking", Black and Rogaway 2002). Where a column orders the rows, a pass has a table of its order, and only
equal rows are shuffled.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.wire.mixture import Source
from schema.wire.prompts import PromptFile, PromptFileError, start_of_answer
from schema.wire.row_order import ordered

ROUNDS = 8
"""Four rounds are pseudo-random in theory for large domains; eight make small ones look shuffled too."""


class Permutation:
    """A bijection of range(n), keyed by `seed`, `data_pass` and the name of the source."""

    def __init__(self, n: int, seed: int, data_pass: int, source: str = "") -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} elements")
        self._n = n
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        stream = f"{seed}/{data_pass}/{n}"
        suffix = f"/{source}" if source else ""
        texts = (f"{stream}/{i}{suffix}".encode() for i in range(ROUNDS))
        self._keys = [hashlib.blake2b(text, digest_size=16).digest() for text in texts]

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


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of rows that a job counts with.

    n: all rows. sources: those of each source, where sources have shares. early: rows that were prepared before the
    others; early_digest: their hash; early_places: that of where they stand in the data. unfinished: whether these
    are all that there are as yet. grown: numbers of rows that a job may have begun with, before there were all of
    these. digest: the hash of the prepared rows.
    """

    n: int
    sources: tuple[Source, ...] = ()
    early: int = 0
    early_digest: str = ""
    early_places: str = ""
    unfinished: bool = False
    grown: tuple[int, ...] = ()
    digest: str = ""


class Prompts:
    """Prepared rows by pass, position and source."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int,
        shuffle: bool,
        shares: Mapping[str, float] | None = None,
        stages: Sequence[Mapping[str, float]] = (),
        descending: bool | None = None,
        to_start_of_answer: bool = False,
    ) -> None:
        """shares: of the sources, by name; without them all rows are one source. stages: those of each later stage.

        descending: whether the largest number of the column that orders the rows comes first; None: none does.

        to_start_of_answer: the prompt of a conversation with a loss mask is what is in front of its last learnt turn.

        Raises `PromptFileError`.
        """
        self._path, self._identity = path, _identity(path)
        self._file, self._to_start_of_answer = PromptFile(path), to_start_of_answer
        self._seed, self._shuffle = seed, shuffle
        self._numbers = None if descending is None else self._file.order() * (-1 if descending else 1)
        self._orders: dict[int, dict[tuple[int, int], Callable[[int], int]]] = {}
        """The orders that were asked for last: of each source two, by pass and the first of their rows."""
        self._stretches = self._file.grown
        """The numbers of rows behind which others are shuffled apart from these."""
        if self._stretches and self._numbers is not None:
            raise PromptFileError(
                f"{path} has more rows than the run began with, and a column orders them: begin a new run, or go on "
                "with the train.max_num_steps that it had"
            )
        if self._file.early and self._numbers is not None:
            raise PromptFileError(f"{path} was prepared without curriculum.column_name: prepare the data again")
        by_source = self._file.sources(shares, stages) if shares else {}
        self.sources, self._rows = tuple(by_source), list(by_source.values())
        early, unfinished = self._file.early, self._file.unfinished
        self._early = [source.early for source in self.sources] or [early]
        begun = {early} if early and not unfinished else set()
        grown = tuple(sorted({*self._stretches, *begun} - {len(self)}))
        self.counts = RowCounts(
            len(self),
            self.sources,
            early,
            self._file.early_digest,
            self._file.early_places,
            unfinished,
            grown,
            self._file.digest,
        )

    def __len__(self) -> int:
        return len(self._file)

    @property
    def replaced(self) -> bool:
        """Whether another file is in the place of this one."""
        return _identity(self._path) not in (self._identity, None)

    def labels(self) -> list[str]:
        """The part that each prepared row is of, empty where parts are not told apart. Raises `PromptFileError`."""
        labels = [""] * len(self)
        for name, rows in self._file.rows_by_source().items():
            for row in rows.tolist():
                labels[row] = name
        return labels

    @property
    def digest(self) -> str:
        """The hash of the prepared file; empty: it does not name one, or its rows are not handed out as they are."""
        return "" if self._to_start_of_answer else self._file.digest

    def row_index(self, data_pass: int, position: int, source: int = 0) -> int:
        """The prepared row of a group."""
        rows = self._rows[source] if self._rows else None
        if self._shuffle or self._numbers is not None:
            start, end = self._stretch(data_pass, position, source)
            known = self._orders.setdefault(source, {})
            if (data_pass, start) not in known:
                known[data_pass, start] = self._order(data_pass, source, end - start)
                if len(known) > 2:
                    del known[next(iter(known))]
            position = start + known[data_pass, start](position - start)
        return position if rows is None else int(rows[position])

    def _stretch(self, data_pass: int, position: int, source: int) -> tuple[int, int]:
        """The rows that are shuffled together.

        Those that earlier files of the run had stay where they were, and the first pass begins with the early ones.
        """
        early = [] if data_pass else [self._early[source]]
        ends = sorted({*self._stretches, *early, len(self._rows[source]) if self._rows else len(self)} - {0})
        k = bisect_right(ends, position)
        return (ends[k - 1] if k else 0), ends[min(k, len(ends) - 1)]

    def _order(self, data_pass: int, source: int, n: int) -> Callable[[int], int]:
        """Which of n rows of a source stands at each position of a pass."""
        name = self.sources[source].name if self._rows else ""
        if self._numbers is None:
            return Permutation(n, self._seed, data_pass, name)
        numbers = self._numbers[self._rows[source]] if self._rows else self._numbers
        order = ordered(numbers, f"{self._seed}/{data_pass}/{n}/{name}" if self._shuffle else "")
        return lambda position: int(order[position])

    def get(self, data_pass: int, position: int, source: int = 0) -> tuple[list[int], dict[str, Any]]:
        """Prompt token ids and the dataset row for rewards."""
        index = self.row_index(data_pass, position, source)
        tokens = self._file.token_ids(index)
        if self._to_start_of_answer:
            tokens = tokens[: start_of_answer(self._file.loss_mask(index))]
        return tokens.tolist(), self._file.row(index)


def _identity(path: Path) -> tuple[int, int] | None:
    """Another value for each file in this place; None: there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns
