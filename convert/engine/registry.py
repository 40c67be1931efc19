"""The systems whose files can be read, each a folder with a `READER` in its `reader`, and which one a file is of.

A new system is a folder, and a line in SYSTEMS.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

from convert.engine.foreign import by_hand, described, other_system
from convert.engine.keys import leaves
from convert.engine.rules import Reader
from convert.engine.source import Source, not_read
from schema.config.problem import ConfigError, Problem

SYSTEMS = {"verl": "convert.verl", "roll": "convert.roll", "cosmos-rl": "convert.cosmos"}
"""The name of a system on the command line -> its folder."""


def reader(system: str) -> Reader:
    """The reader of a system, imported when it is needed; KeyError for a name that is not in SYSTEMS."""
    imported = importlib.import_module(f"{SYSTEMS[system]}.reader").READER
    assert isinstance(imported, Reader)
    return imported


def readers() -> list[Reader]:
    """All readers, in the order in which detection asks them."""
    return [reader(system) for system in SYSTEMS]


def detect(source: Source, readers: Sequence[Reader]) -> tuple[Reader, str]:
    """The reader and the kind of a file; raises ConfigError that says what it looks like, or what was looked for.

    Keys of a system without a reader win, unless the file has a key that only a system with one has, and is of none
    made from that.
    """
    candidates = [(reader, kind) for reader in readers if (kind := reader.detect(source)) is not None]
    if (system := other_system(source.data)) is not None:
        certain = [(reader, kind) for reader, kind in candidates if _has_own(source, reader)]
        if system.is_made_from_verl or not certain:
            message, hint = described(system)
            if candidates and not system.is_made_from_verl:
                names = " or ".join(f"{reader.title}, --system {reader.system}" for reader, _ in candidates)
                hint = f"{hint}; if it is a file of {names}"
            raise ConfigError([Problem("", message, hint=hint, file=source.name)])
        candidates = certain
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        titles = " and ".join(reader.title for reader, _ in candidates)
        hint = f"say which: --system {' or --system '.join(reader.system for reader, _ in candidates)}"
        raise ConfigError([Problem("", f"has keys of {titles}", hint=hint, file=source.name)])
    looked = "; ".join(f"{reader.title}: {', '.join(reader.signs)}" for reader in readers)
    written = ", ".join(list(source.data)[:8]) or "none"
    message = f"no configuration of {' or '.join(reader.title for reader in readers)} (its keys: {written})"
    hint = f"{_composed(source)}looked for {looked}. {by_hand()}"
    raise ConfigError([Problem("", message, hint=hint, file=source.name)])


def _has_own(source: Source, reader: Reader) -> bool:
    return any(source.has(*key.split(".")) for key in reader.own)


def kind_of(source: Source, reader: Reader) -> str:
    """The kind of a file that is said to be of this system; raises ConfigError where nothing fits."""
    kind = reader.detect(source)
    if kind is None:
        hint = f"{_composed(source, reader.title)}looked for {', '.join(reader.signs)}"
        message = f"has no key of {reader.title}'s configurations"
        if (other := other_system(source.data)) is not None:
            looks, hint = described(other)
            message = f"{message}: {looks}"
        raise ConfigError([Problem("", message, hint=hint, file=source.name)])
    return kind


def _composed(source: Source, system: str = "") -> str:
    """The first part of a hint, for a file whose keys stand in others."""
    is_part = any(str(value).startswith("verl.") for _, value in leaves(source.data))
    left_out, remedy = not_read(source.data.get("defaults"), "verl" if is_part else system)
    if any(re.fullmatch(r"[+~]*\w+(\.\w+)+", key) for key in source.data):
        return "a key with dots is one name here, and a table on Hydra's command line: nest its parts. Else: "
    part = "a part of what Hydra composes for verl: convert the whole of it. " if is_part else ""
    return part + (f"{left_out}; {remedy}. Else: " if left_out else "")
