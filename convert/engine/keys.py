"""Dotted keys, and the leaves of nested tables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from schema.config.problem import quote
from schema.config.sections.unsupported import TABLE

Path = tuple[str, ...]

_PLAIN = re.compile(r"[^.\s\"'=\[\]]+")


def dotted(path: Path) -> str:
    """A path as one dotted key; a part with dots, blanks or quotes in it is quoted. Letters of any script stay."""
    return ".".join(part if _PLAIN.fullmatch(part) else quote(part) for part in path)


def words(text: str) -> tuple[str, ...]:
    """Names that a table writes with blanks between them."""
    return tuple(text.split())


def renamed(text: str) -> dict[Any, str]:
    """Names with blanks between them, each `theirs=ours`, or one for both: theirs -> ours."""
    pairs = (name.partition("=") for name in text.split())
    return {theirs: ours or theirs for theirs, _, ours in pairs}


def unsupported_key(source: str) -> str:
    """The dotted key of a source's key in our table `[unsupported]`."""
    return dotted((TABLE, source))


def split_key(key: str) -> Path:
    """The parts of a dotted key; the reverse of `dotted`."""
    if '"' not in key:
        return tuple(key.split("."))
    parts: list[str] = []
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[^.]+', key):
        text = match.group()
        parts.append(tomllib.loads(f"x = {text}")["x"] if text.startswith('"') else text)
    return tuple(parts)


def leaves(table: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not a table, with its path; an empty table is a leaf. Lists are leaves."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def lookup(table: Mapping[str, Any], path: Path, default: Any = None) -> Any:
    """The value at a path, or `default`."""
    value: Any = table
    for part in path:
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def store(table: dict[str, Any], path: Path, value: Any) -> bool:
    """Write a value at a path, making tables on the way; False where something else than a table stands there."""
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return False
    if isinstance(table.get(path[-1]), dict) and not isinstance(value, dict):
        return False
    table[path[-1]] = value
    return True
