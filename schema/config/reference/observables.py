"""What each key changes that one can see, and where it is read: one entry per key that acts in this build.

    observable("train.optm_lr") ─▶ Observable(kind, sentence, read_in)

Keys of parts that are not built are refused by `availability`; that refusal is their observable and is derived
from its table. A key stands in both tables when some of its values act and others are refused. Tests hold that
every key of the schema has an entry, that the modules named read the key, and that it can be seen to act.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schema.config.availability import UNAVAILABLE
from schema.config.reference.observable_table import TABLE

Kind = Literal[
    "sampling parameter",
    "engine argument",
    "process",
    "number",
    "request or reply",
    "file",
    "metric",
    "refusal",
]
"""What is looked at: a field of a generation request; an argument of the inference engine; a process (how many,
its command line and environment); a tensor or number of the trainer; what the controller or a worker asks and
answers; what is written where; a reported value; or that the key is refused by name."""


@dataclass(frozen=True)
class Observable:
    """What one key changes.

    read_in: modules that read it, as paths within the project; empty for what is only refused.
    reads: the name under which they read it, where that is not the key's own (a property of the config).
    """

    kind: Kind
    sentence: str
    read_in: tuple[str, ...] = ()
    reads: str = ""


OBSERVABLES: dict[str, Observable] = {
    key: Observable(kind, sentence, tuple(read_in.split()), reads)  # type: ignore[arg-type]
    for key, (kind, sentence, read_in, reads) in TABLE.items()
}


def refused_by(key: str) -> str | None:
    """The row of `UNAVAILABLE` that covers a key: its own, or that of a table around it."""
    parts = key.split(".")
    rows = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((row for row in rows if row in UNAVAILABLE), None)


def observable(key: str) -> Observable:
    """What a key of the schema changes; raises KeyError for what is no key that holds a value."""
    if key in OBSERVABLES:
        return OBSERVABLES[key]
    row = refused_by(key)
    if row is None:
        raise KeyError(key)
    where = "" if row == key else f"{row}: "
    return Observable("refusal", f"{where}this build cannot do {UNAVAILABLE[row].missing} yet.")
