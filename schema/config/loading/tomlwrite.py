"""A configuration as TOML text: plain values first, then tables, in the order of the sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schema.config.problem import format_key, quote


def dumps(table: Mapping[str, Any]) -> str:
    """TOML text that `tomllib` reads back as the same values; keys whose value is None are left out."""
    return "\n".join(_table((), table)).lstrip("\n") + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lines: list[str] = []
    if path and (plain or not tables):
        lines += ["", f"[{format_key(path)}]"]
    lines += [f"{format_key((key,))} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        lines += _table((*path, key), value)
    return lines


def toml_value(value: Any) -> str:
    """A value as TOML writes it on one line; None inside tables is left out."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{format_key((key,))} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(items) + " }" if value else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")
