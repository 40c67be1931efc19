"""Committed steps: their records, the speed that follows from them, and the step count of a supervised job.

Speeds are over a sliding window while training goes on: (work of the steps after the window's first commit) /
(time since that commit). The first commit of a run starts the clock, so model loading and compilation before it
never count.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from controller.ledger.ledger import CommitOutcome, LedgerError
from controller.ledger.reconcile import Lineage
from schema.wire.messages import ErrorCode, LedgerSnapshot, StepRecord

WINDOW_SECONDS = 60.0
"""Long enough to smooth steps of a second, short enough to see a change."""
WINDOW_STEPS = 8
"""The window never holds fewer steps than this, however long they take."""
MOST = 2.0**53
"""Samples or tokens of a step: what is more is no number of any."""


@dataclass(frozen=True, slots=True)
class Speed:
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


class StepLog:
    """Records of committed steps, in order."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Names of metrics, each combination once."""
        entries = [
            self._entry(StepRecord.model_validate(row["record"]), row["samples"], row["tokens"])
            for row in rows
        ]
        self._entries = sorted(entries, key=lambda entry: entry.step)
        self._dirty: dict[int, _Entry | None] = {}

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

    def _entry(self, record: StepRecord, samples: int, tokens: int) -> _Entry:
        names = tuple(record.metrics)
        values = array("d", record.metrics.values())
        return _Entry(record.step, record.at, self._names.setdefault(names, names), values, samples, tokens)

    def add(self, record: StepRecord, samples: int, tokens: int) -> None:
        self._entries.append(self._entry(record, samples, tokens))
        self._dirty[record.step] = self._entries[-1]

    def rewind(self, step: int) -> None:
        """Forget the steps from `step` on: they will be trained again."""
        for entry in self._entries:
            if entry.step >= step:
                self._dirty[entry.step] = None
        self._entries = [entry for entry in self._entries if entry.step < step]

    def recent(self) -> Speed:
        """Speed over the sliding window up to the last commit."""
        if not self._entries:
            return Speed()
        horizon = self._entries[-1].at - WINDOW_SECONDS
        start = max(0, len(self._entries) - 1 - WINDOW_STEPS)
        while start > 0 and self._entries[start - 1].at >= horizon:
            start -= 1
        return _speed(self._entries[start:])

    def overall(self) -> Speed:
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


def _speed(entries: list[_Entry]) -> Speed:
    if len(entries) < 2:
        return Speed()
    seconds = entries[-1].at - entries[0].at
    if seconds <= 0:
        return Speed()
    counted = entries[1:]
    return Speed(
        sum(entry.samples for entry in counted) / seconds,
        sum(entry.tokens for entry in counted) / seconds,
        seconds / len(counted),
    )


def own_counts(metrics: Mapping[str, float]) -> tuple[int, int]:
    """Samples and tokens of a step, counted by a supervised trainer itself; bounded, whatever it claims."""
    samples, tokens = (int(min(max(metrics.get(name, 0.0), 0.0), MOST)) for name in ("samples", "tokens"))
    return samples, tokens


class StepCounter:
    """The steps of a supervised job, which has no groups: the part of the ledger's interface that remains."""

    def __init__(self, total_steps: int, n_positions: int | None = None) -> None:
        self.total_steps, self.n_positions = total_steps, n_positions
        self.committed = 0
        self.durable = 0
        self.timeline = 0
        self.began = 0
        """Step at which the present timeline began."""
        self.lineage = Lineage()

    @property
    def finished(self) -> bool:
        return self.committed >= self.total_steps

    @property
    def epochs(self) -> int:
        """Its trainer knows: rows are counted there."""
        return 0

    def commit(self, step: int) -> CommitOutcome:
        """Finish a step. Repeated commits of an earlier step are answered and not counted."""
        if step < self.committed:
            return CommitOutcome(self.committed, duplicate=True)
        if step > self.committed or self.finished:
            detail = f"step {step} cannot be committed: {self.committed} of {self.total_steps} steps are done"
            raise LedgerError(ErrorCode.WRONG_STEP, detail)
        self.committed += 1
        return CommitOutcome(self.committed)

    def abandon_step(self) -> int:
        return 0

    def checkpoint(self, step: int) -> int:
        self._check(step, "checkpoint")
        self.durable = max(self.durable, step)
        return self.durable

    def snapshot(self, step: int) -> LedgerSnapshot:
        self._check(step, "snapshot")
        return LedgerSnapshot(
            committed_steps=step,
            timeline=self.timeline,
            frontier=0,
            untrained=[],
            n_positions=self.n_positions,
        )

    def rewind(self, step: int, timeline: int | None = None) -> None:
        """Go back to `step`; a new timeline begins (its number, if it has one already)."""
        self._check(step, "rewind")
        self.committed, self.began, self.durable = step, step, min(self.durable, step)
        self.timeline = self.timeline + 1 if timeline is None else timeline
        self.lineage.begin(self.timeline, step)

    def check_snapshot(self, snapshot: LedgerSnapshot) -> None:
        """Raises `LedgerError` for a checkpoint of other data."""
        if snapshot.n_positions not in (None, self.n_positions):
            raise LedgerError(
                ErrorCode.CONFLICT,
                f"the checkpoint was made with {snapshot.n_positions} prepared rows, this job has "
                f"{self.n_positions}: its steps would be other rows. Use the same data, or start from the "
                f"checkpoint's exported weights (policy.model_name_or_path) without resuming",
            )

    def begin_from(
        self, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None
    ) -> None:
        """Go on from a checkpoint; a new timeline begins unless the caller says which one it is.

        Raises:
            LedgerError: the checkpoint is of other data.
        """
        self.check_snapshot(snapshot)
        self.committed = self.durable = snapshot.committed_steps
        self.began = snapshot.committed_steps if began is None else began
        self.timeline = max(self.timeline, snapshot.timeline) + 1 if timeline is None else timeline
        self.lineage.begin_from(snapshot.timeline, self.committed, self.timeline, self.began)

    def _check(self, step: int, what: str) -> None:
        if step > self.committed:
            detail = f"{what} of step {step}, committed are {self.committed}"
            raise LedgerError(ErrorCode.WRONG_STEP, detail)

    def header(self) -> dict[str, Any]:
        return {
            "committed": self.committed,
            "durable": self.durable,
            "timeline": self.timeline,
            "began": self.began,
            "lineage": self.lineage.to_record(),
        }

    @classmethod
    def restore(cls, total_steps: int, header: Mapping[str, Any], n_positions: int | None = None) -> Self:
        counter = cls(total_steps, n_positions)
        counter.committed, counter.durable = header["committed"], header["durable"]
        counter.timeline, counter.began = header["timeline"], header["began"]
        counter.lineage = Lineage.from_header(header)
        return counter
