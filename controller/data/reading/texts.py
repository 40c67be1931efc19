"""Rows of text files: objects of JSON, one per line or in an array, and rows of CSV and TSV. Compressed or not.

    text_shape(path, name) -> columns, length        read_text(path, name) -> rows

A row that cannot be read is `Unreadable`, with its line; the others are read all the same. A stream that is damaged
or ends too early ends the reading: what follows cannot be had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

from controller.data.errors import DataError
from controller.data.reading.tables import PASSED, Unreadable, Wanted, every, row_name
from schema.config.data_files import UnreadableDataError
from schema.config.text_files import csv_fault, csv_header, csv_rows, delimiter_of, lines_of, open_text


def text_shape(path: Path, name: str) -> tuple[list[str], int]:
    """Columns and length. Raises `DataError` where there are rows, and none of the first can be read.

    name: of the file, for errors.
    """
    columns: dict[str, None] = {}
    count, fault = 0, ""
    for row in read_text(path, name):
        count += 1
        columns.update(dict.fromkeys(row))
        fault = fault or (row.fault if isinstance(row, Unreadable) else "")
    if fault and not columns:
        raise DataError(fault)
    return list(columns), count


def read_text(path: Path, name: str, wanted: Wanted = every) -> Iterator[dict[str, Any]]:
    """All rows of a file, by its ending. Raises `DataError`. name: of the file, for errors. wanted: see `tables`."""
    try:
        with open_text(path) as file:
            delimiter = delimiter_of(path)
            yield from _csv_rows(file, delimiter, name, wanted) if delimiter else _json_rows(file, name, wanted)
    except UnreadableDataError as error:
        text = f"{error}; {error.hint}" if error.hint else str(error)
        raise DataError(text.replace(str(path), name)) from None
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from None


def _csv_rows(file: IO[bytes], delimiter: str, name: str, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Rows with a text for each column of the header. Raises UnreadableDataError where the header cannot be read."""
    rows = csv_rows(file, delimiter)
    header = csv_header(rows, name)
    if header is None:
        return
    for i, (line, cells, problem) in enumerate(rows):
        if not wanted(i):
            yield PASSED
        elif fault := problem or csv_fault(cells, header):
            yield Unreadable(f"{name}, line {line}: {fault}")
        else:
            yield dict(zip(header, cells, strict=True))


def _json_rows(file: IO[bytes], name: str, wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Objects of a JSON array or, whatever the ending, of one object per line."""
    lines = lines_of(file)
    blank = 0
    first = b""
    for first in lines:
        if first.strip():
            break
        blank += 1
    if first.lstrip().startswith(b"["):
        text = first + file.read()
        escaped = b"\\u" in text
        for i, value in enumerate(_parse(text, name)):
            yield _object(value, row_name(name, i), escaped) if wanted(i) else PASSED
        return
    i = -1
    for number, line in enumerate(chain([first], lines), blank + 1):
        if not line.strip():
            continue
        i += 1
        if not wanted(i):
            yield PASSED
        else:
            where = f"{name}, line {number}"
            try:
                value = _parse(line, where)
            except DataError as error:
                yield Unreadable(str(error))
            else:
                yield _object(value, where, b"\\u" in line)


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object each of whose keys is there once: of two, a reader would take either. Raises ValueError."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        repeated = next(name for name in fields if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"an object has the key {repeated!r} more than once: keep one of them")
    return fields


def _object(value: Any, where: str, escaped: bool) -> dict[str, Any]:
    """A row. escaped: whether its JSON has escapes, which may be half of a pair, not a character."""
    if not isinstance(value, dict):
        return Unreadable(f"{where} is not an object of columns but {type(value).__name__}")
    if escaped:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            return Unreadable(f"{where} is not valid text: {error}")
    return value
