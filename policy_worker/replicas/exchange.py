"""An exchange of gradients: one vector for each part of a batch; each replica has some of them and needs all.

The same rank of each replica takes part, with the gradients of its own shards; ranks of other numbers are not met.
Nothing waits without an end: an exchange is over when it is complete, when it is to stop (another
membership epoch has begun, for example), or when nothing has come for too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PIECE_BYTES = 32 << 20
"""Bytes of a vector that travel, and are added, at once."""
LOOK_S, LONGEST_LOOK_S = 0.001, 0.05
"""How often it is looked whether something has come, at first and in the end."""


class ExchangeEnded(Exception):
    """It was to stop, or nothing came: nobody has applied anything. Says why."""


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange: of an optimizer step, in a membership epoch.

    counts: parts of each member, in order. me: which member this one is."""

    timeline: int
    step: int
    number: int
    epoch: int
    counts: tuple[int, ...]
    me: int

    @property
    def parts(self) -> int:
        """How many the batch has."""
        return sum(self.counts)

    @property
    def owners(self) -> list[int]:
        """Which member computes each part."""
        return [member for member, count in enumerate(self.counts) for _ in range(count)]

    @property
    def mine(self) -> list[int]:
        """The parts of this member."""
        return [part for part, owner in enumerate(self.owners) if owner == self.me]

    @property
    def name(self) -> str:
        """A name that no other round of the job has."""
        return f"t{self.timeline}-s{self.step}-n{self.number}-e{self.epoch}"


class Exchange(Protocol):
    """A transport. One round at a time; a round may be begun anew under another membership epoch."""

    def pieces(self, round_: Round, own: Mapping[int, Tensor]) -> Iterator[tuple[slice, Sequence[Tensor]]]:
        """Yield for each piece of a vector where it is, and that piece of all parts, in order; not to be changed.

        own: the vectors of this member's parts, [n] each, at least one unless it has none; all of one type. A member
        without parts has to know n: it hands in any vector under -1.

        Raises `ExchangeEnded`."""

    def notes(self, round_: Round, own: Mapping[int, bytes]) -> list[bytes]:
        """Return the notes of this member and the others on all parts, in order. Raises `ExchangeEnded`."""

    def close(self) -> None:
        """Free what it holds. Idempotent."""


class ExchangeWatch:
    """The end of waiting. stop: why it is to end, "" while it is not. seconds: without news."""

    def __init__(self, stop: Callable[[], str], seconds: float) -> None:
        self._stop, self._seconds = stop, seconds

    def until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Wait until `is_ready()` returns true. Raises `ExchangeEnded`."""
        give_up, pause = time.monotonic() + self._seconds, LOOK_S
        while not is_ready():
            if reason := self._stop():
                raise ExchangeEnded(f"{what}: {reason}")
            if time.monotonic() > give_up:
                raise ExchangeEnded(f"{what} did not come within {self._seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)


def cut(vector: Tensor) -> Iterator[slice]:
    """The pieces of a vector, in order."""
    size = max(1, PIECE_BYTES // vector.element_size())
    for start in range(0, len(vector), size):
        yield slice(start, min(start + size, len(vector)))
