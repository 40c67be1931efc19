"""Values of columns as JSON holds them: what rewards get, and what a chat template renders.

| value | becomes |
|---|---|
| a decimal | its digits as text |
| a date, a time | text as ISO 8601 writes it |
| a duration | seconds, a number |
| bytes | text in base64 |
| NaN, infinite numbers | "NaN", "Infinity", "-Infinity" |
| a UUID | text |
| numbers and arrays of numpy, tuples | numbers, lists |
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from controller.data.errors import DataError

Note = Callable[[str], object]


def jsonable(value: Any, note: Note = lambda _: None) -> Any:
    """The value as JSON holds it. note: is called with what became of a value that JSON lacks.

    Raises `DataError` for a type that has no such form, and for values that are nested too deeply.
    """
    try:
        return _jsonable(value, note)
    except RecursionError:
        raise DataError("lists or objects are nested too deeply (hundreds of levels)") from None


def _jsonable(value: Any, note: Note) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return _number(float(value), note)
    if isinstance(value, dict):
        return {key_text(name): _jsonable(inner, note) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner, note) for inner in value]
    if isinstance(value, np.ndarray):
        return _jsonable(value.tolist(), note)
    if isinstance(value, np.generic):
        return _jsonable(str(value) if isinstance(value, np.datetime64) else value.item(), note)
    text, what = _text(value)
    note(what)
    return text


def key_text(key: Any) -> str:
    """A key of a map as JSON writes it. Raises `DataError` for a type that has no such form."""
    plain = key if isinstance(key, str) else jsonable(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _number(value: float, note: Note) -> float | str:
    if math.isfinite(value):
        return value
    note('numbers that are not finite as "NaN", "Infinity", "-Infinity"')
    return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"


def _text(value: Any) -> tuple[str | float, str]:
    """A value that JSON lacks, and what that is called. Raises `DataError`."""
    if isinstance(value, Decimal):
        return f"{value:f}", "decimals as text"
    if isinstance(value, timedelta):
        return value.total_seconds(), "durations as seconds"
    if isinstance(value, (date, time)):
        return value.isoformat(), "dates and times as text (ISO 8601)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode(), "bytes as text (base64)"
    if isinstance(value, UUID):
        return str(value), "UUIDs as text"
    raise DataError(
        f"a value of type {type(value).__name__} has no form in JSON; write it as text or numbers, or leave the "
        "column out"
    )


def json_list(text: str, kind: type) -> list[Any] | None:
    """The list of items of this kind that a text is the JSON of, else None: any text may begin with a bracket."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if value and all(isinstance(item, kind) for item in value) else None


def without_nulls(value: Any) -> Any:
    """The value without the fields that are null, at every depth.

    Parquet and Arrow give every struct the fields of all rows, null where a row has none. What a row does not have
    must not be read, so a null field is left out, whatever the file's format. Items of lists stay.
    """
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(item) for item in value]
    return value


def is_missing(value: Any) -> bool:
    """Whether a value says that there is none: null, or NaN, which pandas writes in its place."""
    return value is None or (isinstance(value, (float, np.floating)) and math.isnan(value))
