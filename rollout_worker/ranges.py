"""Names of what a replica is at, for Nsight Systems and any other NVTX tool: ranges of the domain `cosmos`.

What waits in the event loop overlaps with its like, so these are process ranges: each has an id by which it is ended.
`generate` lasts from an engine request to its last sample, `score` for one sample, `update` while weights are taken
into use. Without a tool nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from schema.util.nvtx_domain import ATTACHED, DOMAIN, attributes


def begin(name: str) -> int:
    """Open a range; its id."""
    return DOMAIN.start_range(attributes(name)) if ATTACHED else 0


def end(number: int) -> None:
    """Close the range with this id."""
    if ATTACHED:
        DOMAIN.end_range(number)


def ending(name: str) -> Callable[[object], None]:
    """Open a range; a callback of a future that closes it."""
    number = begin(name)
    return lambda _: end(number)


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range around a block of a coroutine."""
    number = begin(name)
    try:
        yield
    finally:
        end(number)


class OpenRanges:
    """Ranges of one name that end piece by piece, by key."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[str, tuple[int, int]] = {}

    def begin(self, key: str, pieces: int) -> None:
        """Open a range that ends with its last piece."""
        if ATTACHED:
            self._open[key] = begin(self._name), pieces

    def piece(self, key: str) -> None:
        """One piece is done."""
        if key in self._open:
            number, left = self._open.pop(key)
            if left > 1:
                self._open[key] = number, left - 1
            else:
                end(number)

    def drop(self, keys: Iterable[str]) -> None:
        """End the ranges of what is given up."""
        for key in keys:
            if key in self._open:
                end(self._open.pop(key)[0])
