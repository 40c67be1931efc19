"""One file of another system as a `Source`: its values, where each stands, and its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from convert.engine.foreign import VERL_COMMAND, VERL_MAIN, command_kind, script_kind, script_problem
from convert.engine.keys import Path, leaves, lookup
from convert.engine.model import CONVERTED
from schema.config.loading.positions import locate
from schema.config.loading.tomlread import parse_toml, read_text
from schema.config.loading.yamlread import read_yaml
from schema.config.problem import ConfigError, Problem


@dataclass(frozen=True)
class Source:
    """A file as it was read.

    lines: the line (from 1) of each key. shared: keys at the top with aliases elsewhere. is_ours: whether a
    conversion wrote it.
    """

    name: str
    data: dict[str, Any]
    lines: Mapping[Path, int] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    is_ours: bool = False

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

    A script or a command line is refused, with the system that it starts and the way to a configuration.
    """
    if kind := script_kind(text, name):
        raise _script_error(kind, text, name)
    try:
        source = _read(text, name)
    except ConfigError:
        if kind := command_kind(text):
            raise _script_error(kind, text, name) from None
        raise
    if all(" " in key for key in source.data) and (kind := command_kind(text)):
        raise _script_error(kind, text, name)
    if sum(1 for _ in leaves(source.data)) > MAX_LEAVES:
        message = f"more than {MAX_LEAVES} keys: not a configuration"
        raise ConfigError([Problem("", message, hint="is it the right file?", file=name)])
    return replace(source, is_ours=text.startswith(CONVERTED))


def _script_error(kind: str, text: str, name: str) -> ConfigError:
    message, hint = script_problem(kind, text)
    return ConfigError([Problem("", message, hint=hint, file=name)])


def _read(text: str, name: str) -> Source:
    if name.endswith(".toml"):
        return _toml(text, name)
    if not name.endswith((".yaml", ".yml")):
        try:
            return _toml(text, name)
        except ConfigError:
            pass  # then it is YAML, or YAML's error says what is wrong
    return Source(name, *read_yaml(text, name))


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


def not_read(defaults: Any, system: str = "") -> tuple[str, str]:
    """A sentence on Hydra's list of defaults, and the remedy; ("", "") where it names no other file.

    system: whose file it is; "" where that is not known.
    """
    names = [name for name in map(_name, defaults if isinstance(defaults, list) else []) if name]
    if not names:
        return "", ""
    command = VERL_COMMAND.format(module=VERL_MAIN)
    composed = f"convert what Hydra composes: {command}, with the --config-name of this file"
    written = "write their keys into this file"
    remedy = {"verl": composed, "": f"{written}, or of verl {composed}"}.get(system, written)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"`defaults` names files that are not read: {shown}", remedy


def _name(entry: Any) -> str:
    """One file of the list: `ppo_trainer`, or `actor@actor_rollout_ref.actor: dp_actor`; "" for the file itself."""
    if isinstance(entry, dict):
        return ", ".join(f"{group}: {name}" for group, name in entry.items() if name not in (None, "null"))
    return "" if entry in ("_self_", None) else str(entry)
