"""Samples as people see them: how many were scored or failed, and the text of those that are kept.

A kept sample, from its arrival until it is known what became of it:

    pushed ─▶ open ─ its step is committed ─▶ finished with advantage and the trainer's log-probs
      │         └── its group is dropped ───▶ finished with the reason
      └─ failed, or of a validation ────────▶ finished at once

Pure. What is finished is taken by `controller.services.events`, which writes it to the run's files. Nothing of this
is in the store but as part of the payloads, from which a controller that starts again reads it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from controller.ledger.group import Group
from schema.wire.messages import SampleRecord, TrainedSample
from schema.wire.sample import SampleHeader

MOST_OPEN = 4096
"""Groups: more than may be outstanding in any job that somebody reads; those of an abandoned past go first."""
MOST_FINISHED = 4096
"""Records that wait to be written: a disk that stands still costs records, not memory."""
MOST_KINDS = 64
"""Kinds of failures that are counted apart; all further ones are `OTHERS`."""
OTHERS = "others"


@dataclass(slots=True)
class RewardStats:
    """Counts of samples. seconds: of scoring, waiting for a process included. timed: samples with any of them."""

    scored: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    timed: int = 0

    def observe(self, header: SampleHeader, kind: str) -> bool:
        """A sample arrived; whether it is the first that failed in this way."""
        self.seconds += header.seconds or 0.0
        self.timed += header.seconds is not None
        if header.error is None:
            self.scored += 1
            return False
        self.timeouts += header.outage
        if kind not in self.failed and len(self.failed) >= MOST_KINDS:
            kind = OTHERS
        self.failed[kind] += 1
        return self.failed[kind] == 1

    def to_record(self) -> dict[str, Any]:
        return {
            "scored": self.scored,
            "timeouts": self.timeouts,
            "seconds": self.seconds,
            "failed": dict(self.failed),
            "timed": self.timed,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        failed = Counter[str](record["failed"])
        timed = record.get("timed", record["scored"] + failed.total())
        return cls(record["scored"], record["timeouts"], record["seconds"], failed, timed)


class SampleLog:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._open: dict[str, dict[int, SampleRecord]] = {}
        self._finished: list[SampleRecord] = []

    @property
    def finished(self) -> bool:
        """Whether there is something to write."""
        return bool(self._finished)

    def pushed(self, record: SampleRecord) -> None:
        """A sample was accepted."""
        if record.error is not None or record.kind == "validation":
            self._finish([record])
            return
        self._open.setdefault(record.group, {})[record.index] = record
        while len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]

    def trained(self, step: int, timeline: int, groups: Iterable[str], samples: list[TrainedSample]) -> None:
        """A step was committed: of these groups, with what the trainer says of `samples`."""
        known = {(sample.group_id, sample.index): sample for sample in samples}
        for group in groups:
            for record in self._open.pop(group, {}).values():
                change = {"step": step, "timeline": timeline}
                sample = known.get((group, record.index))
                trained = {} if sample is None else {
                    "advantage": sample.advantage, "trainer_logprobs": sample.logprobs
                }  # fmt: skip
                self._finish([record.model_copy(update={**change, **trained})])

    def dropped(self, groups: Iterable[Group], step: int, timeline: int) -> None:
        """Groups were dropped while `step` was under way."""
        for group in groups:
            records = self._open.pop(group.id, {}).values()
            change = {"dropped": str(group.reason), "step": step, "timeline": timeline}
            self._finish(record.model_copy(update=change) for record in records)

    def take(self) -> list[SampleRecord]:
        """Return the records that are to be written, once."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, records: Iterable[SampleRecord]) -> None:
        self._finished.extend(records)
        del self._finished[:-MOST_FINISHED]
