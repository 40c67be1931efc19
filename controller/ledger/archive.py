"""The archive holds what the ledger keeps of groups that it no longer keeps whole: the step that trained each, or why
it was dropped.

A group that was trained, and whose payload cannot be needed again, is but a number in its step; one that was
dropped is a number next to its reason. That is a few bytes each, so neither memory nor a restart grows much with
the length of a run, and still a rewind knows which positions were trained since, and the counters add up.

    rows    "s<step>"  {"t": positions trained in this step, "s": samples trained by staleness}
            "d<n>"     [[position, reason], …]: the n-th DROPS_PER_ROW drops

Positions are those of the stream (`schema.wire.mixture`). Each stands here at most once, and never
while its group is in the ledger.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

DROPS_PER_ROW = 256
_UNKNOWN, _DROPPED = -1, -2
"""Marks of positions that no step trained; the n-th reason is _DROPPED - n."""


@dataclass(slots=True)
class _Step:
    trained: array[int] = field(default_factory=lambda: array("q"))
    staleness: dict[int, int] = field(default_factory=dict)


class Archive:
    """See the module's docstring."""

    def __init__(self, sources: int = 1) -> None:
        """sources: how many streams take turns in the numbers of positions: each of its own length."""
        self._steps: dict[int, _Step] = {}
        self._drops = array("q")
        self._reasons: list[str] = []
        self._outcomes = [array("i") for _ in range(sources)]
        """By source, and by position in its stream: the step, or a negative mark."""
        self._dirty: set[str] = set()

    # ---- what others ask ----------------------------------------------------------------------------------

    @property
    def trained(self) -> int:
        return sum(len(step.trained) for step in self._steps.values())

    def trained_before(self, step: int) -> int:
        """Groups trained in steps below `step`."""
        return sum(len(entry.trained) for number, entry in self._steps.items() if number < step)

    @property
    def dropped(self) -> Counter[str]:
        """Groups by reason."""
        return Counter(reason for position in self._drops if (reason := self.reason_of(position)))

    def step_of(self, position: int) -> int | None:
        """The step that trained a position; None if it was dropped or is not known here."""
        outcome = self._at(position)
        return outcome if outcome >= 0 else None

    def reason_of(self, position: int) -> str | None:
        """Why a position was dropped; None if it was trained or is not known here."""
        outcome = self._at(position)
        return self._reasons[_DROPPED - outcome] if outcome <= _DROPPED else None

    def __contains__(self, position: int) -> bool:
        return self._at(position) != _UNKNOWN

    def trained_since(self, step: int) -> list[int]:
        """Positions trained in `step` or later, in the order of the stream."""
        return sorted(
            position for number, entry in self._steps.items() if number >= step for position in entry.trained
        )

    def staleness_since(self, step: int) -> Counter[int]:
        """Samples trained in `step` or later by staleness."""
        counts: Counter[int] = Counter()
        for number, entry in self._steps.items():
            if number >= step:
                counts.update(entry.staleness)
        return counts

    def _at(self, position: int) -> int:
        if position < 0:
            return _UNKNOWN
        ordinal, source = divmod(position, len(self._outcomes))
        outcomes = self._outcomes[source]
        return outcomes[ordinal] if ordinal < len(outcomes) else _UNKNOWN

    # ---- changes ------------------------------------------------------------------------------------------

    def add_trained(self, position: int, step: int, staleness: Mapping[int, int]) -> None:
        """A group trained in `step`, with its samples by staleness."""
        self._mark(position, step)
        entry = self._steps.get(step)
        if entry is None:
            entry = self._steps[step] = _Step()
        entry.trained.append(position)
        for steps, count in staleness.items():
            entry.staleness[steps] = entry.staleness.get(steps, 0) + count
        self._dirty.add(f"s{step}")

    def add_dropped(self, position: int, reason: str) -> None:
        """A group that was dropped for good."""
        if reason not in self._reasons:
            self._reasons.append(reason)
        self._mark(position, _DROPPED - self._reasons.index(reason))
        self._dirty.add(f"d{len(self._drops) // DROPS_PER_ROW}")
        self._drops.append(position)

    def rewind(self, step: int) -> tuple[list[int], Counter[int]]:
        """Forget what was trained in `step` and later: these positions, and their samples by staleness."""
        positions = self.trained_since(step)
        staleness = self.staleness_since(step)
        for number in [number for number in self._steps if number >= step]:
            del self._steps[number]
            self._dirty.add(f"s{number}")
        for position in positions:
            self._forget(position)
        return positions, staleness

    def forget_drop(self, position: int) -> None:
        """A drop did not happen after all: the store had lost that the position was trained."""
        index = self._drops.index(position)
        last = (len(self._drops) - 1) // DROPS_PER_ROW
        self._dirty.update(f"d{number}" for number in range(index // DROPS_PER_ROW, last + 1))
        self._drops.pop(index)
        self._forget(position)

    def clear(self) -> None:
        """Forget everything."""
        self._dirty.update(f"s{number}" for number in self._steps)
        self._dirty.update(f"d{index // DROPS_PER_ROW}" for index in range(0, len(self._drops), DROPS_PER_ROW))
        self._steps, self._drops = {}, array("q")
        self._outcomes = [array("i") for _ in self._outcomes]

    def _mark(self, position: int, outcome: int) -> None:
        ordinal, source = divmod(position, len(self._outcomes))
        outcomes = self._outcomes[source]
        missing = ordinal + 1 - len(outcomes)
        if missing > 0:
            outcomes.extend([_UNKNOWN] * missing)
        assert outcomes[ordinal] == _UNKNOWN, f"position {position} ended twice"
        outcomes[ordinal] = outcome

    def _forget(self, position: int) -> None:
        ordinal, source = divmod(position, len(self._outcomes))
        self._outcomes[source][ordinal] = _UNKNOWN

    # ---- storing ------------------------------------------------------------------------------------------

    def take_changes(self) -> Mapping[str, Callable[[], Any]]:
        """The rows that changed since the last call: by name, how each is rendered."""
        changed, self._dirty = {name: partial(self.row, name) for name in self._dirty}, set()
        return changed

    def row(self, name: str) -> Any:
        """One row as plain values; None: it is gone."""
        number = int(name[1:])
        if name[0] == "d":
            first = number * DROPS_PER_ROW
            positions = self._drops[first : first + DROPS_PER_ROW]
            return [[position, self.reason_of(position)] for position in positions] or None
        entry = self._steps.get(number)
        if entry is None:
            return None
        return {"t": list(entry.trained), "s": {str(k): v for k, v in entry.staleness.items()}}

    @classmethod
    def restore(cls, rows: Mapping[str, Any], sources: int = 1) -> Archive:
        """Rebuild from the rows that were written."""
        archive = cls(sources)
        for name in sorted(rows, key=lambda name: (name[0], int(name[1:]))):
            row = rows[name]
            if name[0] == "d":
                for position, reason in row:
                    archive.add_dropped(position, reason)
            else:
                step = int(name[1:])
                entry = archive._steps[step] = _Step(array("q", row["t"]))
                entry.staleness = {int(k): v for k, v in row["s"].items()}
                for position in entry.trained:
                    archive._mark(position, step)
        archive._dirty.clear()
        return archive
