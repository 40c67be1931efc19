"""The systems whose files can be read, each in a module of its own with a `READER`, imported when needed."""

from __future__ import annotations

import importlib

from schema.interop.engine.rules import Reader

MODULES = {
    "verl": "schema.interop.verl.reader",
    "roll": "schema.interop.roll.reader",
    "cosmos-rl": "schema.interop.cosmos.reader",
}


def reader(system: str) -> Reader:
    """The reader of a system; KeyError for a name that is not in MODULES."""
    found = importlib.import_module(MODULES[system]).READER
    assert isinstance(found, Reader)
    return found


def readers() -> list[Reader]:
    """All readers, in the order in which detection asks them."""
    return [reader(system) for system in MODULES]
