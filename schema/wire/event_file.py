"""`RUN/events.jsonl`: the events of a run, one JSON object a line, only ever appended to.

The controller writes it, and whatever shows a run reads it: also of a run whose processes are all gone. A controller
that is killed may leave half a line behind, which the next one completes with a line end and readers pass over.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from schema.wire.messages.dashboard import Fault
from schema.wire.messages.events import Event, EventKind
from schema.wire.messages.job import ValidationRecord
from schema.wire.messages.steps import StepRecord

NAME = "events.jsonl"
_ID = re.compile(rb'\{"id":(\d{1,15}),')
"""How `append` begins a line."""
TAIL = 1 << 16
"""Bytes at the end in which the newest event is looked for."""
MOST_FAULTS, MOST_FAULT_TEXT = 50, 4000
"""Kinds of failures that are counted apart, and characters of each."""


def path_of(run_dir: Path) -> Path:
    return run_dir / NAME


def append(path: Path, events: Iterable[Event]) -> None:
    """Add events at the end, after what a killed writer may have left of a line. Raises OSError."""
    with path.open("ab+") as file:
        lines = b"".join(event.model_dump_json().encode() + b"\n" for event in events)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        file.write(lines)


def read(path: Path, after: int = 0) -> Iterator[Event]:
    """Events with an id above `after`, in order; nothing where there is no file. Raises OSError.

    What was written twice, by a writer that was cancelled, is read once.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            match = _ID.match(line)
            if match and int(match[1]) <= after:
                continue
            event = parse(line)
            if event is not None and event.id > after:
                after = event.id
                yield event


class Tail:
    """Reads a file that grows: each call of `read` gives the events that were added since the one before."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._newest = path, 0, 0

    def read(self) -> list[Event]:
        """New events; half a line is left for the next call. Raises OSError."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            event = parse(line)
            if event is not None and event.id > self._newest:
                self._newest = event.id
                events.append(event)
        return events


def parse(line: bytes) -> Event | None:
    """The event of a line; None of half a line, or of one that something else wrote."""
    try:
        return Event.model_validate_json(line)
    except ValidationError:
        return None


def last_id(path: Path) -> int:
    """Id of the newest event in the file; 0: there is none. Raises OSError."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            tail = file.read()
    except FileNotFoundError:
        return 0
    ids = [event.id for line in tail.split(b"\n") if (event := parse(line)) is not None]
    # One event can be longer than the tail.
    return max(ids) if ids else max((event.id for event in read(path)), default=0)


@dataclass(slots=True)
class Course:
    """The state of a run by its events: steps and validations in order, without those that were undone.

    Invariant: after each `add`, steps are strictly rising, and no validation is of a version beyond the last step's
    unless no step has been committed since.
    """

    steps: list[StepRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)

    @classmethod
    def from_records(cls, summary: Mapping[str, Any]) -> Course:
        """From the `steps` and `validations` of a summary; empty where it has none that this version can read."""
        try:
            steps = [StepRecord.model_validate(record) for record in summary.get("steps") or []]
            validations = [ValidationRecord.model_validate(record) for record in summary.get("validations") or []]
        except ValidationError:
            return cls()
        return cls(steps, validations)

    def add(self, event: Event) -> int | None:
        """Take an event in. Returns the step from which on all was undone; None: nothing was."""
        undone = None
        if event.kind is EventKind.STEP:
            data = {name: event.data[name] for name in StepRecord.model_fields}
            undone = self._undo(data["step"])
            self.steps.append(StepRecord.model_validate(data))
        elif event.kind is EventKind.VALIDATION:
            record = ValidationRecord.model_validate(event.data)
            before = [known for known in self.validations if known.version < record.version]
            later = [known for known in self.validations if known.version > record.version and record.is_completed]
            self.validations = [*before, record, *later]
        elif event.kind is EventKind.REWIND:
            undone = self._undo(event.data["step"])
        return undone

    def _undo(self, step: int) -> int | None:
        """Forget steps from `step` on, and validations of versions that contain one of them."""
        keep = bisect_left(self.steps, step, key=lambda record: record.step)
        undone = step if keep < len(self.steps) else None
        del self.steps[keep:]
        if undone is not None:
            self.validations = [record for record in self.validations if record.version <= step]
        return undone


@dataclass(slots=True)
class Health:
    """The newest statements of a run besides its numbers, bounded however many events there are."""

    job: dict[str, Any] = field(default_factory=dict)
    """`data` of the newest event about the job, with its text."""
    alarms: dict[str, str] = field(default_factory=dict)
    """The alarms that are on, by name."""
    faults: dict[str, Fault] = field(default_factory=dict)
    """By kind, that of the newest failure last. Drops are counted; of a reward's kind only the first is an event."""

    def add(self, event: Event) -> None:
        data, kind = event.data, event.kind
        if kind is EventKind.DROP:
            text = str(data.get("error") or event.text)
            self._fault(f"dropped: {data['reason']}", int(data["count"]), event.at, text)
        elif kind is EventKind.REWARD:
            self._fault(str(data.get("failure", "")), 1, event.at, str(data.get("error") or event.text))
        elif kind is EventKind.JOB:
            self.job = {**data, "text": event.text}
        elif kind is EventKind.ALARM and data.get("on"):
            self.alarms[data["name"]] = event.text
        elif kind is EventKind.ALARM:
            self.alarms.pop(data["name"], None)

    def _fault(self, kind: str, count: int, at: float, text: str) -> None:
        earlier = self.faults.pop(kind, None)
        count += earlier.count if earlier else 0
        self.faults[kind] = Fault(kind=kind, count=count, at=at, text=text[:MOST_FAULT_TEXT])
        if len(self.faults) > MOST_FAULTS:
            del self.faults[next(iter(self.faults))]


class EventReader(Protocol):
    def add(self, event: Event) -> object:
        """Take an event in."""


def fold(events: Iterable[Event], *readers: EventReader) -> None:
    """Give each event to all readers; one with data of another version, or damaged, is passed over."""
    for event in events:
        for reader in readers:
            with suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
                reader.add(event)


def course(events: Iterable[Event]) -> Course:
    """The state that a run has reached."""
    state = Course()
    fold(events, state)
    return state
