"""This module decides which source the next group is of, so that shares hold among the groups that are trained.

Each source is a stream of its own: its rows come in passes of its own, ordered by seed and place alone, and a group
is the next one of its source. Only which source comes next depends on what happened: a group that is dropped counts
no longer, so the next row of its own source takes its place.

    kept of a source = drawn - dropped, of which all but those in flight are trained
    next             = the source of which share / (kept + 1/2) is largest (Webster's method of apportionment)

Invariants: each source has its share of the kept groups but for less than one group per source; so of n trained
groups it has n * share, up to those in flight. And on-policy, where each step waits for its own groups, what is kept
of each source depends on how many groups are kept, not on when which of them were dropped: what comes next after a
drop is the last of what would have been there without it. So a job trains the same rows whatever is killed.

Shares of a stage count from so many kept groups on, those that a resumed job changes from the moment of that.

A job hands out `passes` times as many groups as there are rows at most, dropped ones included. With
`exhausted = "stop"` it ends before, where the source that comes next has gone through its rows `passes` times.

A job without shares is a mixture of one source.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

Exhausted = Literal["repeat", "stop"]


@dataclass(frozen=True, slots=True)
class Source:
    """A part of the data with a share of its own. rows: prepared rows. share: more than 0, at the beginning.

    stages: the shares that it has later: one for each stage of the mixture. early: rows that were prepared before the
    others (`schema.wire.prompts`).
    """

    name: str
    rows: int
    share: float = 1.0
    stages: tuple[float, ...] = ()
    early: int = 0


class OtherSourcesError(ValueError):
    """A record is of other sources, and cannot be continued; the text says which they were."""


class Mixture:
    """See the module's docstring. drawn, dropped: groups of each source that were handed out, and given up."""

    def __init__(
        self, sources: Sequence[Source], passes: int, exhausted: Exhausted = "repeat", stages: Sequence[int] = ()
    ) -> None:
        """stages: how many groups are kept when each stage begins, rising."""
        self.sources, self.passes, self._exhausted = tuple(sources), passes, exhausted
        self._starts = (0, *stages)
        self._shares = [_normed([source.share for source in sources])]
        self._shares += [_normed([source.stages[k] for source in sources]) for k in range(len(stages))]
        self.limit = passes * sum(source.rows for source in sources)
        """The most groups that are handed out."""
        mix, rows = [self._starts, self._shares], [passes, exhausted, [source.rows for source in sources]]
        self._rule = f"{_digest(mix)}.{_digest(rows)}"
        """Identifies the shares of all stages, and the other facts that the total follows from."""
        self.drawn = [0] * len(sources)
        self.dropped = [0] * len(sources)
        self._begin()
        self.total = self._total()
        """The most groups that are trained."""

    @classmethod
    def unfinished(cls, sources: Sequence[Source], stages: Sequence[int] = ()) -> Self:
        """Make a mixture of the early rows, while the others are being prepared: it ends where a source needs those.

        What it hands out is the beginning of what that of all rows hands out.
        """
        return cls(sources, 1, "stop", stages)

    def _begin(self) -> None:
        """Count from here on: these shares begin."""
        self._base, self._base_drawn = self.kept, list(self.drawn)
        self._bases = [self._base]
        """The counts of what is kept of each source when a stage begins: the present one, and later ones that were
        asked for."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the present stage, which add up to 1."""
        return self._shares[self._stage(sum(self.kept))]

    def _stage(self, kept: int) -> int:
        """The stage of the group that comes after so many kept ones."""
        if len(self._starts) == 1:
            return 0
        return bisect_right(self._starts, max(0, kept, sum(self._base))) - 1

    def _base_of(self, stage: int) -> list[int]:
        """Count what is kept of each source when a stage begins, which is the one of the base or comes later."""
        first = self._stage(0)
        while stage - first >= len(self._bases):
            before, last = self._bases[-1], first + len(self._bases) - 1
            added = _apportioned(self._shares[last], self._starts[last + 1] - sum(before))
            self._bases.append([count + more for count, more in zip(before, added, strict=True)])
        return self._bases[stage - first]

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def handed_out(self) -> int:
        """Groups that were handed out."""
        return sum(self.drawn)

    @property
    def kept(self) -> list[int]:
        """Groups of each source that were handed out and not given up."""
        return [drawn - dropped for drawn, dropped in zip(self.drawn, self.dropped, strict=True)]

    def _total(self) -> int:
        """Count the groups that are kept at the end where none is dropped since the shares began."""
        if self._exhausted == "repeat":
            return self.limit
        begun, drawn = sum(self._base), list(self._base_drawn)
        stage, kept = self._stage(0), begun
        while True:
            left = [self.passes * source.rows - count for source, count in zip(self.sources, drawn, strict=True)]
            rest = _before_the_end(self._shares[stage], left)
            if stage + 1 == len(self._starts) or kept + rest < self._starts[stage + 1]:
                break
            added = _apportioned(self._shares[stage], self._starts[stage + 1] - kept)
            drawn = [count + more for count, more in zip(drawn, added, strict=True)]
            stage, kept = stage + 1, self._starts[stage + 1]
        return min(kept + rest, begun + max(0, self.limit - sum(self._base_drawn)))

    def next(self) -> int | None:
        """The source of the next group; None: the job has no further one."""
        if self.handed_out >= self.limit:
            return None
        if len(self) == 1:
            return 0
        kept = self.kept
        stage = self._stage(sum(kept))
        counts = [count - base for count, base in zip(kept, self._base_of(stage), strict=True)]
        source = _first(self._shares[stage], counts)
        if self._exhausted == "stop" and self.drawn[source] >= self.passes * self.sources[source].rows:
            return None
        return source

    def draw(self, source: int) -> int:
        """Hand out the next group of a source; returns where it is in the stream."""
        self.drawn[source] += 1
        return (self.drawn[source] - 1) * len(self) + source

    def order(self, most: int | None = None) -> npt.NDArray[np.int64]:
        """Draw the groups of a job in which none is dropped, as supervised training does: their places, [total].

        most: how many are enough; None: all.
        """
        most = self.limit if most is None else min(most, self.limit)
        if len(self) == 1:
            return np.arange(most)
        places = array("q")
        while len(places) < most and (source := self.next()) is not None:
            places.append(self.draw(source))
        return np.frombuffer(places, np.int64) if places else np.zeros(0, np.int64)

    # ---- places in the stream -----------------------------------------------------------------------------------

    def place(self, at: int) -> tuple[int, int, int]:
        """Pass, position in it, and source of a place in the stream."""
        ordinal, source = divmod(at, len(self))
        return *divmod(ordinal, self.sources[source].rows), source

    def at(self, data_pass: int, position: int, source: int) -> int:
        """Where a group is in the stream."""
        return (data_pass * self.sources[source].rows + position) * len(self) + source

    def find(self, data_pass: int, position: int, source: int) -> int | None:
        """Where a group is in the stream; None: the job cannot have it."""
        if source >= len(self) or position >= self.sources[source].rows:
            return None
        at = self.at(data_pass, position, source)
        return at if at // len(self) < self.limit else None

    def undrawn(self, at: int) -> int:
        """Count the groups of its source up to this place that were not handed out; 0 or less: it was."""
        ordinal, source = divmod(at, len(self))
        return ordinal + 1 - self.drawn[source]

    def handed_out_places(self) -> Iterator[int]:
        """All places that were handed out, in the order of the stream."""
        own_places = (range(k, drawn * len(self), len(self)) for k, drawn in enumerate(self.drawn))
        return heapq.merge(*own_places)

    # ---- storing ------------------------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        return {
            "names": [source.name for source in self.sources],
            "rows": [source.rows for source in self.sources],
            "shares": list(self.shares),
            "drawn": list(self.drawn),
            "dropped": list(self.dropped),
            "base": list(self._base),
            "base_drawn": list(self._base_drawn),
            "total": self.total,
            "rule": self._rule,
        }

    def load(self, record: Mapping[str, Any]) -> None:
        """Go on from a record. Raises `OtherSourcesError`: nothing has changed."""
        before = dict(zip(record["names"], record["rows"], strict=True))
        now = {source.name: source.rows for source in self.sources}
        if before not in (now, {source.name: source.early for source in self.sources}):
            raise OtherSourcesError(f"it was made with other sources (rows of each: {before}; now {now})")
        if record["names"] != [source.name for source in self.sources]:
            names = ", ".join(record["names"])
            raise OtherSourcesError(f"its sources are in another order: write the parts or domains as {names}")
        self.drawn, self.dropped = list(record["drawn"]), list(record["dropped"])
        self._begin()
        mix, _, rows = record.get("rule", "").partition(".")
        same = self._rule.startswith(f"{mix}.") if mix else list(record["shares"]) == list(self.shares)
        if same:
            self._base, self._base_drawn = list(record["base"]), list(record["base_drawn"])
            self._bases = [self._base]
        total = record.get("total") if f"{mix}.{rows}" == self._rule else None
        self.total = self._total() if total is None else total


def _normed(shares: Sequence[float]) -> tuple[float, ...]:
    weight = sum(shares)
    return tuple(share / weight for share in shares)


def _first(shares: Sequence[float], counts: Sequence[int]) -> int:
    """The source that comes next. counts: what is kept of each since the shares began; less than 0: it lacks some."""
    best, lacks, rank = -1, 0, 0.0
    for k, share in enumerate(shares):
        if not share:
            continue
        count = counts[k]
        value = share / (count + 0.5) if count > 0 else share / 0.5
        if best < 0 or max(0, -count) > lacks or (max(0, -count) == lacks and value > rank):
            best, lacks, rank = k, max(0, -count), value
    return best


def _rank(shares: Sequence[float], source: int, count: int) -> tuple[float, int]:
    """The rank of a source's group, before which there are so many of it: those of higher ones come first."""
    return shares[source] / (count + 0.5), -source


def _apportioned(shares: Sequence[float], n: int) -> list[int]:
    """How many of the first n groups each source has, where none is dropped."""
    counts = [max(0, int(n * share + 0.5) - 1) for share in shares]  # of these it has each, whatever rounding does
    for _ in range(n - sum(counts)):
        counts[_first(shares, counts)] += 1
    return counts


def _before_the_end(shares: Sequence[float], left: Sequence[int]) -> int:
    """How many groups come before one of a source that has none left. left: those that each has."""
    end = max(_rank(shares, k, max(0, left[k])) for k, share in enumerate(shares) if share)
    groups = 0
    for k, share in enumerate(shares):
        count = max(0, math.ceil(share / end[0] - 0.5)) if share else 0
        while share and _rank(shares, k, count) > end:
            count += 1
        while count and _rank(shares, k, count - 1) <= end:
            count -= 1
        groups += count
    return groups


def _digest(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
