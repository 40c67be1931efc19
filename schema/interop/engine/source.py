"""One file of another system as a `Source`: its values, where each stands, and its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from schema.config.loading.positions import locate
from schema.config.loading.tomlread import parse_toml, read_text
from schema.config.problem import ConfigError, Problem
from schema.interop.engine.composed import refuse_script
from schema.interop.engine.keys import Path, leaves, lookup
from schema.interop.engine.yamlfile import read_yaml


@dataclass(frozen=True)
class Source:
    """A file as it was read. lines: the line (from 1) of each key."""

    name: str
    data: dict[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int | None:
        """The line of a key, or else of the nearest table around it that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def has(self, *path: str) -> bool:
        """Whether the file has a key or table at this path (null counts)."""
        absent = object()
        return lookup(self.data, path, absent) is not absent


def read_file(path: FilePath) -> str:
    """The text of a file; raises ConfigError with the reason where it cannot be read."""
    return read_text(path, "YAML or TOML")


MAX_LEAVES = 10_000
"""Keys that hold a value: verl's longest file has 900, and each gets a line of the account."""


def read_source(text: str, name: str) -> Source:
    """A text as TOML where it is TOML (or its name ends in .toml), else as YAML. Raises ConfigError.

    A shell script is refused, with the way to the configuration that it starts.
    """
    refuse_script(text, name)
    source = _read(text, name)
    if sum(1 for _ in leaves(source.data)) > MAX_LEAVES:
        message = f"more than {MAX_LEAVES} keys: not a configuration"
        raise ConfigError([Problem("", message, hint="is it the right file?", file=name)])
    return source


def _read(text: str, name: str) -> Source:
    if name.endswith(".toml"):
        return _toml(text, name)
    if not name.endswith((".yaml", ".yml")):
        try:
            return _toml(text, name)
        except ConfigError:
            pass  # then it is YAML, or YAML's error says what is wrong
    data, lines = read_yaml(text, name)
    return Source(name, data, lines)


def _toml(text: str, name: str) -> Source:
    try:
        data = parse_toml(text)
    except RecursionError:
        raise ConfigError([Problem("", "broken TOML: nested too deeply", file=name)]) from None
    except ValueError as error:
        raise ConfigError([Problem("", f"broken TOML: {error}", file=name)]) from None
    try:
        positions = locate(text)
    except (ValueError, IndexError, RecursionError):
        positions = {}  # a place is a courtesy: without it the key still names the entry
    lines = {tuple(str(part) for part in path): position[0] for path, position in positions.items() if path}
    return Source(name, data, lines)
