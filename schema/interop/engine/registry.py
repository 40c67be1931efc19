"""The systems whose files can be read, each a folder with a `READER` in its `reader`, and which one a file is of.

A new system is a folder, and a line in SYSTEMS.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from schema.config.problem import ConfigError, Problem
from schema.interop import SYSTEMS
from schema.interop.engine.composed import not_read
from schema.interop.engine.rules import Reader
from schema.interop.engine.source import Source


def reader(system: str) -> Reader:
    """The reader of a system, imported when it is needed; KeyError for a name that is not in SYSTEMS."""
    found = importlib.import_module(f"{SYSTEMS[system]}.reader").READER
    assert isinstance(found, Reader)
    return found


def readers() -> list[Reader]:
    """All readers, in the order in which detection asks them."""
    return [reader(system) for system in SYSTEMS]


def detect(source: Source, readers: Sequence[Reader]) -> tuple[Reader, str]:
    """The reader and the kind of a file; raises ConfigError that lists what was looked for."""
    found = [(reader, kind) for reader in readers if (kind := reader.detect(source)) is not None]
    if len(found) == 1:
        return found[0]
    names = ", ".join(reader.system for reader in readers)
    if found:
        both = " and ".join(reader.title for reader, _ in found)
        hint = f"say which: --system {' or --system '.join(reader.system for reader, _ in found)}"
        raise ConfigError([Problem("", f"has keys of {both}", hint=hint, file=source.name)])
    looked = "; ".join(f"{reader.title}: {', '.join(reader.signs)}" for reader in readers)
    written = ", ".join(list(source.data)[:8]) or "none"
    message = f"no configuration of {' or '.join(reader.title for reader in readers)} (its keys: {written})"
    hint = f"{_composed(source)}looked for {looked}. If it is one, say which: --system {names}"
    raise ConfigError([Problem("", message, hint=hint, file=source.name)])


def kind_of(source: Source, reader: Reader) -> str:
    """The kind of a file that is said to be of this system; raises ConfigError where nothing fits."""
    kind = reader.detect(source)
    if kind is None:
        hint = f"{_composed(source, reader.title)}looked for {', '.join(reader.signs)}"
        raise ConfigError(
            [Problem("", f"has no key of {reader.title}'s configurations", hint=hint, file=source.name)]
        )
    return kind


def _composed(source: Source, system: str = "") -> str:
    """The first part of a hint, for a file whose keys stand in others."""
    left_out, remedy = not_read(source.data.get("defaults"), system)
    return f"{left_out}; {remedy}. Else: " if left_out else ""
