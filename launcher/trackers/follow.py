"""Which steps a tracker has to get: those that count and that it does not have, also after a rewind or a restart.

Invariant: after `send`, the tracker's present segment has exactly the steps of the run's course up to the newest
event that was read, each once, in order; and each validation, at the step of its version. Tables of answers come
after all numbers, so that a tracker which fails at them still has these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from launcher.trackers.sinks import Sink
from launcher.trackers.tables import AnswerTable, AnswerTables
from schema.scores.summary import estimates_of
from schema.wire.event_file import Course
from schema.wire.messages import Event, EventKind, ValidationRecord


@dataclass(slots=True)
class Sent:
    """The last step, version and event that a tracker has, -1: none. It is stored, for the process that follows."""

    segment: int = 0
    step: int = -1
    version: int = -1
    event: int = -1
    shown_step: int = -1
    """The last step and version whose answers it has."""
    shown_version: int = -1
    scored: int = -1
    """The last version to whose loss it has the scores, too."""


class TrackerFollower:
    """One tracker's way through the events.

    open_sink: anew, or where it was left. save: stores what it has. tables: of answers; None: none are shown.
    """

    def __init__(
        self,
        sent: Sent,
        open_sink: Callable[[Sent], Sink],
        save: Callable[[Sent], None] = lambda _: None,
        tables: AnswerTables | None = None,
    ) -> None:
        self.sent, self._open, self._save, self._tables = sent, open_sink, save, tables or AnswerTables(Path())
        self._course = Course()
        self._newest = sent.event
        self._sink: Sink | None = None

    def read(self, events: Iterable[Event]) -> bool:
        """Take events in. False: what the tracker has was undone; it begins anew, and wants all events again.

        Raises nothing, or events would be lost: those whose data another version wrote are passed over.
        """
        for event in events:
            with suppress(KeyError, TypeError, ValidationError):
                if event.id > self.sent.event and self._undoes(event):
                    self._begin_anew()
                    return False
                self._course.add(event)
            self._newest = max(self._newest, event.id)
        return True

    def _begin_anew(self) -> None:
        sink, self._sink = self._sink, None
        self._course, self.sent = Course(), Sent(self.sent.segment + 1)
        if sink is not None:
            with suppress(Exception):  # what it has was undone: it may be lost
                sink.close()

    def _undoes(self, event: Event) -> bool:
        """Whether an event takes back what the tracker has."""
        if event.kind is EventKind.STEP:
            step, pending = event.data["step"], self._course.steps
            beyond = bool(pending) and pending[-1].step >= step and self.sent.version > step
            return bool(step <= self.sent.step) or beyond
        if event.kind is EventKind.VALIDATION:
            completes = event.data.get("loss") is not None and event.data.get("scores") is not None
            return bool(event.data["version"] <= self.sent.version) and not completes
        back = event.kind is EventKind.REWIND
        return back and (self.sent.step >= event.data["step"] or self.sent.version > event.data["step"])

    def send(self) -> None:
        """Give the tracker what it does not have. Raises whatever its library does; the next call goes on."""
        sink = self._sink = self._sink or self._open(self.sent)
        sent, course = self.sent, self._course
        for record in course.steps:
            if record.step > sent.step:
                sink.log(record.step, record.metrics, record.at)
                sent.step = record.step
        for validation in course.validations:
            scored = validation.is_completed and validation.version > sent.scored
            if scored or validation.version > sent.version:
                sink.log(validation.version, validation_metrics(validation), validation.at)
                sent.version = max(sent.version, validation.version)
                sent.scored = validation.version if scored else sent.scored
        for record in course.steps:
            if record.step > sent.shown_step:
                _show(sink, record.step, self._tables.of_step(record.step), record.at)
                sent.shown_step = record.step
        for validation in course.validations:
            answered = validation.loss is None or validation.is_completed
            if answered and validation.version > sent.shown_version:
                _show(sink, validation.version, self._tables.of_validation(validation.version), validation.at)
                sent.shown_version = validation.version
        course.steps.clear()
        course.validations.clear()
        if sent.event != self._newest:
            sent.event = self._newest
            self._save(sent)

    def close(self) -> None:
        """Send what is left, and end. Raises whatever the tracker's library does."""
        self.send()
        if self._sink is not None:
            self._sink.close()


def _show(sink: Sink, step: int, table: AnswerTable | None, at: float) -> None:
    if table is not None:
        sink.show(step, table, at)


def validation_metrics(record: ValidationRecord) -> dict[str, float]:
    """A validation by the names that trackers show."""
    metrics: dict[str, float] = {}
    if record.loss is not None and record.accuracy is not None:
        metrics = {"validation/loss": record.loss, "validation/accuracy": record.accuracy}
        if not record.is_completed:
            return metrics
    metrics |= {f"validation/reward/{name}": value for name, value in record.rewards_mean.items()}
    if record.score_mean is not None:
        metrics["validation/score"] = record.score_mean
    metrics["validation/response_tokens_mean"] = record.response_tokens_mean
    metrics["validation/errors"] = float(record.errors)
    for name, estimate in ({} if record.scores is None else estimates_of(record.scores)).items():
        metrics[f"validation/{name}"] = estimate.value
    for source, scores in record.sources.items():
        metrics |= {f"validation/source/{source}/{name}": e.value for name, e in estimates_of(scores).items()}
    return metrics
