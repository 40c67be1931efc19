"""The result of a conversion: one `Entry` for every leaf key of the input, and the configuration that follows.

    input leaf ─▶ Entry: mapped ──▶ targets (our key, value) ─┐
                         fallback ▶ targets, value replaced ──┤
                         unsupported ▶ [unsupported]          ├─▶ Conversion.config
                         implicit, none, unknown,             │
                         accepted: a reason                   │
    key absent in the input, their default differs ─▶ Addition┘

Invariant: every leaf of the input has exactly one entry (`missing_leaves`, `repeated_leaves` are empty), and
`config` holds exactly the targets of the entries and the additions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from schema.config.sections.unsupported import TABLE

CONVERTED = "# Converted from "
"""How every file begins that a conversion writes."""

Target = tuple[str, Any]
"""Our dotted key and its value. None leaves the key unset, as TOML has no null."""


class Outcome(StrEnum):
    """The fate of one key of the input."""

    UNSUPPORTED = "unsupported"  # decides what is trained and has no counterpart: refused until it is removed
    MAPPED = "mapped"  # to one or more of our keys, the value maybe computed
    IMPLICIT = "implicit"  # always so here, or repeats another key, or had no effect there either
    FALLBACK = "fallback"  # changes speed or memory only, and its part is not built yet: nearest value
    NONE = "none"  # no counterpart, and not part of the method: `convert.engine.unsupported` has the reason
    UNKNOWN = "unknown"  # not recognised, or a value that cannot be understood
    ACCEPTED = "accepted"  # the same, and accepted by name: nothing is written for it


@dataclass(frozen=True)
class Result:
    """The decision of a `Converter`; see `Entry`."""

    outcome: Outcome
    targets: tuple[Target, ...] = ()
    note: str = ""


def mapped(*targets: Target, note: str = "") -> Result:
    """The value goes to these keys of ours."""
    return Result(Outcome.MAPPED, targets, note)


def implicit(note: str) -> Result:
    """Nothing needs to be written; the note says why."""
    return Result(Outcome.IMPLICIT, (), note)


def no_counterpart(reason: str) -> Result:
    """It has no counterpart. Only with a reason from `convert.engine.unsupported`."""
    return Result(Outcome.NONE, (), reason)


def unsupported(reason: str) -> Result:
    """It has no counterpart, and what is trained depends on it: the key goes into `[unsupported]`."""
    return Result(Outcome.UNSUPPORTED, (), reason)


def unknown(note: str) -> Result:
    """Not recognised."""
    return Result(Outcome.UNKNOWN, (), note)


@dataclass(frozen=True)
class Entry:
    """One leaf key of the input.

    source: its dotted key there. value: its value with interpolations resolved. targets: what is written for
    it (mapped, fallback, unsupported), or nothing. note: how the value was computed, or the reason. line:
    where it stands in the input, from 1. faithful: where `targets` hold the
    nearest values that can be had here (a fallback; a batch that is not whole groups), the ones that would say the
    same. understood: false for a key that is not recognised and a value that cannot be read, whatever its outcome.
    """

    source: str
    value: Any
    outcome: Outcome
    targets: tuple[Target, ...] = ()
    note: str = ""
    line: int | None = None
    faithful: tuple[Target, ...] = ()
    understood: bool = True


@dataclass(frozen=True)
class Addition:
    """A key that no leaf of the input maps to, written because the other system would behave so.

    key, value: ours. note: why, for instance `verl's default`. faithful: the value that says the same, where
    this build lacks the part and `value` is the nearest that it can do.
    """

    key: str
    value: Any
    note: str
    faithful: Any = None


@dataclass(frozen=True)
class Conversion:
    """The result. system: `verl`, `roll` or `cosmos-rl`. kind: which of its files. name: the input's name.

    config: ours, nested, ready for `schema.config.check_config`. leaves: every leaf key of the input in the
    order of the file. warnings: what the reader should look at, most important first.
    """

    system: str
    kind: str
    name: str
    leaves: tuple[str, ...]
    entries: tuple[Entry, ...]
    additions: tuple[Addition, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def missing_leaves(self) -> list[str]:
        """Leaves of the input without an entry. Not empty: a defect of the converter."""
        converted = {entry.source for entry in self.entries}
        return [leaf for leaf in self.leaves if leaf not in converted]

    @property
    def repeated_leaves(self) -> list[str]:
        """Leaves with more than one entry. Not empty: a defect of the converter."""
        counts = Counter(entry.source for entry in self.entries)
        return [leaf for leaf, count in counts.items() if count > 1]

    @property
    def unsupported(self) -> dict[str, Any]:
        """Source key -> value of what decides the method and has no counterpart; those of defaults included."""
        table: dict[str, Any] = self.config.get(TABLE, {})
        return table

    def of(self, outcome: Outcome) -> Sequence[Entry]:
        """The entries with one outcome, in the order of the input."""
        return [entry for entry in self.entries if entry.outcome is outcome]

    def entry(self, source: str) -> Entry:
        """The entry of a leaf key; KeyError where the input has no such leaf."""
        for entry in self.entries:
            if entry.source == source:
                return entry
        raise KeyError(source)
