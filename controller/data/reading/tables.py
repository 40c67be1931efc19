"""Rows of parquet and Arrow files: as their JSON would be, in bounded memory.

    table_shape(path, name) -> columns, length     read_table(path, name) -> rows     rows_of(record batches) -> rows

`wanted` says of a row's position whether it is read; in place of any other stands `PASSED`, which costs little.
Maps become objects, and JSON texts (`arrow.json`, as `datasets` stores fields of mixed types) what they say. pyarrow
is imported on first use, which takes a tenth of a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

from controller.data.errors import DataError
from controller.data.values import key_text
from schema.config.columns import open_table
from schema.config.data_files import UnreadableDataError

BATCH = 256
"""Rows that are made at once, at most."""
BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of them, by what the file says of its rows: a row may have 100,000 tokens."""
Decode = Callable[[Any], Any]


Wanted = Callable[[int], bool]
PASSED: dict[str, Any] = {}
"""In place of a row that is not wanted."""


def every(i: int) -> bool:
    """All rows are wanted."""
    return True


class Unreadable(dict[str, Any]):
    """In place of a row that cannot be read; `column` raises it. fault: why, with its place."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault


def row_name(name: Path | str, i: int) -> str:
    """Name the row at position i (from 0) of a source for an error."""
    return f"{name}, row {i + 1}"


def table_shape(path: Path, name: str) -> tuple[list[str], int]:
    """Columns and length of a file. Raises `DataError`. name: of the file, for errors."""
    with _open(path, name) as table:
        if hasattr(table, "iter_batches"):
            names, length = list(table.schema_arrow.names), int(table.metadata.num_rows)
        else:
            names, length = list(table.schema.names), sum(batch.num_rows for batch in _batches(table))
    if twice := sorted({column for column in names if names.count(column) > 1}):
        raise DataError(f"{name} has more than one column {', '.join(twice)}: rename all but one")
    return names, length


def read_table(path: Path, name: str, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
    """All rows of a file. Raises `DataError`. name: of the file, for errors."""
    with _open(path, name) as table:
        yield from rows_of(_batches(table), name, wanted)


def rows_of(batches: Iterable[Any], name: str, wanted: Wanted = every, start: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of record batches or tables, the first at `start`; where one of a batch cannot be had, the others are."""
    rows: Iterable[dict[str, Any]]
    for batch in batches:
        chosen = [wanted(i) for i in range(start, start + batch.num_rows)]
        if not any(chosen):
            yield from repeat(PASSED, batch.num_rows)
            start += batch.num_rows
            continue
        try:
            rows = _decoded(batch)
        except (ValueError, OverflowError, RecursionError) as error:  # no UTF-8, nanoseconds, a key twice, no JSON
            if batch.num_rows == 1:
                rows = [Unreadable(f"{row_name(name, start)} cannot be read: {error}")]
            else:
                rows = rows_of((batch.slice(i, 1) for i in range(batch.num_rows)), name, start=start)
        yield from (row if is_wanted else PASSED for row, is_wanted in zip(rows, chosen, strict=True))
        start += batch.num_rows


@contextmanager
def _open(path: Path, name: str) -> Iterator[Any]:
    try:
        with open_table(path) as table:
            yield table
    except (UnreadableDataError, OSError) as error:
        raise DataError(str(error).replace(str(path), name)) from None


def _batches(table: Any) -> Iterator[Any]:
    """The record batches of an open file, none of them large."""
    if hasattr(table, "iter_batches"):
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        most = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        yield from table.iter_batches(batch_size=_at_once(most, 1))
        return
    batches = map(table.get_batch, range(table.num_record_batches)) if hasattr(table, "get_batch") else table
    for batch in batches:
        n = _at_once(batch.nbytes, batch.num_rows)
        yield from (batch.slice(start, n) for start in range(0, batch.num_rows, n))


def _at_once(n_bytes: int, n_rows: int) -> int:
    """How many rows are made at once where so many have so many bytes."""
    return max(1, min(BATCH, BATCH_BYTES * n_rows // max(1, n_bytes)))


def _decoded(batch: Any) -> list[dict[str, Any]]:
    decoders = {field.name: decode for field in batch.schema if (decode := _decoder(field.type)) is not None}
    rows: list[dict[str, Any]] = batch.to_pylist()
    for row in rows:
        for name, decode in decoders.items():
            row[name] = decode(row[name])
    return rows


def _decoder(kind: Any) -> Decode | None:
    """Choose what makes of a value of this type what its JSON would be; None: it is so already."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return _or_null(json.loads)
    if types.is_map(kind):
        item = _decoder(kind.item_type)
        return _or_null(lambda pairs: _object(pairs, item))
    if types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _decoder(field.type)) is not None}
        if not fields:
            return None
        return _or_null(lambda struct: {k: fields[k](v) if k in fields else v for k, v in struct.items()})
    if types.is_run_end_encoded(kind) or types.is_dictionary(kind):
        return _decoder(kind.value_type)
    lists = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    if any(is_list(kind) for is_list in lists) and (decode := _decoder(kind.value_type)) is not None:
        return _or_null(lambda items: [decode(item) for item in items])
    return None


def _or_null(decode: Decode) -> Decode:
    return lambda value: None if value is None else decode(value)


def _object(pairs: list[tuple[Any, Any]], decode: Decode | None) -> dict[str, Any]:
    """The object that a map is. Raises ValueError."""
    fields = {key_text(key): value if decode is None else decode(value) for key, value in pairs}
    if len(fields) < len(pairs):
        raise ValueError("a map has a key twice")
    return fields
