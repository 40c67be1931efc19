"""Records of committed steps, and the speed that follows from them.

Speeds are over a sliding window while training goes on: (work of the steps after the window's first commit) /
(time since that commit), up to the last commit: no clock is read. The first commit of a run starts it, so model
loading and compilation before it never count. After a restart of the controller, a pause or a rewind a new one begins
with the next commit; until it has two, the speed is that of before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from schema.wire.messages import StepRecord

WINDOW_SECONDS = 60.0
"""Long enough to smooth steps of a second, short enough to see a change."""
WINDOW_STEPS = 8
"""The window never holds fewer steps than this, however long they take."""
MOST = 2.0**53
"""Samples or tokens of a step: what is more is a mistake."""


@dataclass(frozen=True, slots=True)
class StepSpeed:
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    step_s: float | None = None


@dataclass(slots=True)
class _Entry:
    """One record: its metrics as plain numbers, since there are as many records as steps."""

    step: int
    at: float
    names: tuple[str, ...]
    values: array[float]
    samples: int
    tokens: int

    @property
    def record(self) -> StepRecord:
        return StepRecord(step=self.step, at=self.at, metrics=dict(zip(self.names, self.values, strict=True)))


def _rate(n: int, seconds: float) -> float | None:
    return n / seconds if seconds > 0 else None


DERIVED: dict[str, Callable[[_Entry, float], float | None]] = {
    "at": lambda now, then: now.at,
    "samples_per_s": lambda now, then: _rate(now.samples, now.at - then),
    "tokens_per_s": lambda now, then: _rate(now.tokens, now.at - then),
}
"""Curves of an entry and the time of the commit before it: Unix time of the commit, and speeds."""


class StepLog:
    """Records of committed steps, in order."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Names of metrics, each combination once."""
        entries = [
            self._entry(StepRecord.model_validate(row["record"]), row["samples"], row["tokens"]) for row in rows
        ]
        self._entries = sorted(entries, key=lambda entry: entry.step)
        self._dirty: dict[int, _Entry | None] = {}
        self._begins, self._before = 0, StepSpeed()
        """Entries before the window may begin, and the speed of before."""
        self.begin_window()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last(self) -> StepRecord | None:
        return self._entries[-1].record if self._entries else None

    @property
    def first_at(self) -> float | None:
        return self._entries[0].at if self._entries else None

    def since(self, step: int) -> list[StepRecord]:
        return [entry.record for entry in self._entries if entry.step >= step]

    def ends(self, last: int, first: int = 0, names: Iterable[str] = ()) -> list[StepRecord]:
        """The last so many records, and so many of the first ones that have each of these metrics; in order, once."""
        with_name = ((entry for entry in self._entries if name in entry.names) for name in names)
        firsts = chain.from_iterable(islice(entries, first) for entries in with_name)
        chosen = {entry.step: entry for entry in (*firsts, *self._entries[-last:])}
        return [chosen[step].record for step in sorted(chosen)]

    @property
    def names(self) -> frozenset[str]:
        """All metrics that some step has, and the `DERIVED` ones."""
        return frozenset(DERIVED).union(*self._names) if self._entries else frozenset()

    def newest(self, name: str) -> float | None:
        """A metric of the last step that has it."""
        if not any(name in names for names in self._names):
            return None
        entry = next((entry for entry in reversed(self._entries) if name in entry.names), None)
        return None if entry is None else entry.values[entry.names.index(name)]

    def curve(self, name: str) -> list[tuple[int, float | None]]:
        """Step and value of a metric, for each step; None where a step has none. Any thread may ask."""
        entries = list(self._entries)
        if name in DERIVED:
            before = [entries[0].at if entries else 0.0, *(entry.at for entry in entries)]
            return [(now.step, DERIVED[name](now, then)) for now, then in zip(entries, before, strict=False)]
        # Nearly all steps share one tuple of names: identity distinguishes them.
        places = {id(names): names.index(name) for names in list(self._names) if name in names}
        placed_entries = ((entry, places.get(id(entry.names))) for entry in entries)
        return [(entry.step, None if place is None else entry.values[place]) for entry, place in placed_entries]

    def _entry(self, record: StepRecord, samples: int, tokens: int) -> _Entry:
        names = tuple(record.metrics)
        values = array("d", record.metrics.values())
        return _Entry(record.step, record.at, self._names.setdefault(names, names), values, samples, tokens)

    def add(self, record: StepRecord, samples: int, tokens: int) -> None:
        self._entries.append(self._entry(record, samples, tokens))
        self._dirty[record.step] = self._entries[-1]

    def rewind(self, step: int) -> None:
        """Forget the steps from `step` on: they will be trained again."""
        while self._entries and self._entries[-1].step >= step:
            self._dirty[self._entries.pop().step] = None
        self._begins = min(self._begins, len(self._entries))

    def begin_window(self) -> None:
        """Training stood still: what comes is not mixed with what was."""
        self._before, self._begins = self.recent(), len(self._entries)

    def recent(self) -> StepSpeed:
        """Speed over the sliding window up to the last commit."""
        if not self._entries:
            return StepSpeed()
        begins = self._begins
        if begins and len(self._entries) - begins < 2:
            return self._before
        horizon = self._entries[-1].at - WINDOW_SECONDS
        start = max(begins, len(self._entries) - 1 - WINDOW_STEPS)
        while start > begins and self._entries[start - 1].at >= horizon:
            start -= 1
        return _speed(self._entries[start:])

    def overall(self) -> StepSpeed:
        """Speed from the first commit to the last."""
        return _speed(self._entries)

    def take_changes(self) -> dict[int, dict[str, Any] | None]:
        """Rows to write by step; None: the row is gone."""
        changed, self._dirty = self._dirty, {}
        return {
            step: None
            if entry is None
            else {"record": entry.record.model_dump(), "samples": entry.samples, "tokens": entry.tokens}
            for step, entry in changed.items()
        }


def _speed(entries: list[_Entry]) -> StepSpeed:
    if len(entries) < 2:
        return StepSpeed()
    seconds = entries[-1].at - entries[0].at
    if seconds <= 0:
        return StepSpeed()
    counted = entries[1:]
    return StepSpeed(
        sum(entry.samples for entry in counted) / seconds,
        sum(entry.tokens for entry in counted) / seconds,
        seconds / len(counted),
    )


def mean_score(scores: Iterable[float | None]) -> float | None:
    """The mean of those that are there, of scores or other numbers; None if none is."""
    scored = [score for score in scores if score is not None]
    return sum(scored) / len(scored) if scored else None


def own_counts(metrics: Mapping[str, float]) -> tuple[int, int]:
    """Samples and tokens of a step, counted by a supervised trainer itself; bounded, whatever it claims."""
    samples, tokens = (int(min(max(metrics.get(name, 0.0), 0.0), MOST)) for name in ("samples", "tokens"))
    return samples, tokens
