"""The newest events of a job: kept in the store, from where the run's event file and those who watch are fed.

Events are added between two awaits, with the change of state that they describe, and are staged with it: one
transaction writes both, so the store never knows a change without its event. Ids go on from the highest that is
known, in the store or in the file: a store that lost history leads to gaps, never to an id with two meanings.
What is not in the file yet is kept for it, up to `MOST`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controller.ledger.group import Group
from schema.util.text import one_line
from schema.wire.messages import Event, EventKind

KEPT = 1024
"""Events in memory and in the store, once they are in the file."""
MOST = 1 << 16
"""Events that wait for a file that cannot be written; the oldest go."""
MAX_TEXT = 1000
NAMED = 8
"""Groups that a drop names."""


class EventLog:
    """See the module's docstring. wall: Unix time. file_id: the highest id in the run's event file."""

    def __init__(self, wall: Callable[[], float], rows: Iterable[Mapping[str, Any]] = (), file_id: int = 0) -> None:
        self._wall = wall
        known = sorted((Event.model_validate(row) for row in rows), key=lambda event: event.id)
        self._events: deque[Event] = deque(known)
        self.lost = file_id > (known[-1].id if known else 0)
        """Whether the file has events that the store does not know of: it has lost history."""
        self.highest = max(file_id, known[-1].id if known else 0)
        self.filed = file_id
        """Id of the newest event that is in the file."""
        self._dirty: dict[int, Event | None] = {}

    def add(self, kind: EventKind, text: str, /, **data: Any) -> None:
        """Something happened; `text` says so in one line."""
        self.highest += 1
        line = one_line(text)
        line = line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"
        event = Event(id=self.highest, at=self._wall(), kind=kind, text=line, data=data)
        self._events.append(event)
        self._dirty[event.id] = event
        while len(self._events) > (KEPT if self._events[0].id <= self.filed else MOST):
            self._dirty[self._events.popleft().id] = None

    def drops(self, groups: Iterable[Group]) -> None:
        """Groups that were dropped: one event for each reason."""
        by_reason: dict[str, list[Group]] = {}
        for group in groups:
            by_reason.setdefault(str(group.reason), []).append(group)
        for reason, dropped in by_reason.items():
            errors = Counter(group.error for group in dropped if group.error)
            error = errors.most_common(1)[0][0] if errors else ""
            names = [group.id for group in dropped[:NAMED]]
            listed = ", ".join(names) + (", …" if len(dropped) > NAMED else "")
            why = f": {error.partition(chr(10))[0]}" if error else ""
            noun = "group is" if len(dropped) == 1 else "groups are"
            text = f"{len(dropped)} {noun} dropped as {reason} ({listed}){why}"
            self.add(EventKind.DROP, text, reason=reason, count=len(dropped), groups=names, error=error)

    @property
    def oldest(self) -> int:
        """Id of the oldest event that is kept here; without one that of the next."""
        return self._events[0].id if self._events else self.highest + 1

    def after(self, seen: int) -> list[Event]:
        """Events with a higher id, as far as they are kept here."""
        newer: list[Event] = []
        for event in reversed(self._events):
            if event.id <= seen:
                break
            newer.append(event)
        return newer[::-1]

    @property
    def changed(self) -> bool:
        """Whether there are events that were not staged yet."""
        return bool(self._dirty)

    def take_changes(self) -> dict[int, Callable[[], dict[str, Any]] | None]:
        """Rows to write by id; None: the row is gone."""
        changed, self._dirty = self._dirty, {}
        return {number: None if event is None else event.model_dump for number, event in changed.items()}
