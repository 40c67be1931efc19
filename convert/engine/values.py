"""A value of a file as a number, a flag, a text or a path. Raises BadValue where it cannot be understood."""

from __future__ import annotations

import os.path
from collections.abc import Collection
from typing import Any

from convert.engine.keys import renamed

DTYPES = renamed("fp32=float32 float32 float=float32 bf16=bfloat16 bfloat16 fp16=float16 float16 half=float16")
"""Others' name of a type -> its name in torch."""
MASTERS = {name: "float32" if dtype == "float16" else dtype for name, dtype in DTYPES.items()}
"""The same of weights that an optimizer updates, which here are never float16."""


class BadValue(ValueError):
    """A value of the input that cannot be understood; the message says what was expected."""


def integer(value: Any) -> int:
    """A whole number; 8.0 and "8" are 8. Raises BadValue."""
    if isinstance(value, str):
        value = _number_in(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise BadValue(f"expected a whole number, got {shown(value)}")
    return value


def count(value: Any) -> int:
    """A whole number of at least 1. Raises BadValue."""
    number = integer(value)
    if number < 1:
        raise BadValue(f"expected at least 1, got {number}")
    return number


def number(value: Any) -> float:
    """A finite number; integers stay integers, "1e-6" is one. Raises BadValue."""
    if isinstance(value, str):
        value = _number_in(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadValue(f"expected a number, got {shown(value)}")
    if not abs(value) <= 1e300:  # NaN is not either
        raise BadValue(f"expected a finite number, got {shown(value)}")
    return value


def _number_in(text: str) -> Any:
    try:
        return int(text) if len(text) < 20 else float(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def flag(value: Any) -> bool:
    """True or false, also as text of either case. Raises BadValue."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise BadValue(f"expected true or false, got {shown(value)}")
    return value


def text(value: Any) -> str:
    """Text; a number is taken as it is written. Raises BadValue."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(f"expected text, got {shown(value)}")
    return str(value)


def texts(value: Any) -> list[str]:
    """A list of texts; one text is a list of one. Raises BadValue."""
    if isinstance(value, list):
        return [text(item) for item in value]
    return [text(value)]


def one_of(value: Any, names: Collection[Any]) -> Any:
    """A value that is one of these. Raises BadValue."""
    if isinstance(value, list | dict) or value not in names:
        raise BadValue(f"expected one of {', '.join(map(str, names))}, got {shown(value)}")
    return value


def path(value: Any) -> str:
    """A path or a name on the hub; a leading `~`, which our loader refuses, is written out."""
    written = text(value)
    return os.path.expanduser(written) if written.startswith("~") else written


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    form = repr(value) if not isinstance(value, dict) else "a table"
    return form if len(form) <= 60 else form[:57] + "..."
