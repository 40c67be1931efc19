"""The columns of a local dataset, from its metadata or its first rows: nothing is loaded whole.

A struct's fields count as columns, with dots (`reward_model.ground_truth`): fields of a parquet struct, keys of a
JSON object, and keys of the JSON object that a text holds, as far as they can be seen from here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from schema.config.data_files import FileId, UnreadableDataError
from schema.config.dataset_files import Role, choose
from schema.config.paths import DATA_FORMATS, data_suffix, exists, home_hint
from schema.config.text_files import csv_fault, csv_header, csv_rows, delimiter_of, open_text

_BETWEEN = re.compile(r"[\s,]*")
TABLES = (".parquet", ".arrow")
"""Endings of files that pyarrow reads; the other data files are text."""
FIRST_ROWS = 64
"""Rows of a text file that are looked at: a key may be missing in some."""
PIECE_BYTES = 1024 * 1024
FIRST_ROW_BYTES = 4 * 1024 * 1024  # a first row longer than this is left for the loader to judge


class NoRowsError(UnreadableDataError):
    """A file that can be read and holds no row."""


@dataclass(frozen=True)
class Columns:
    """Names of columns, or of the fields of one; None in place of fields: they are not known from here."""

    fields: dict[str, Columns | None] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a row may have this column, dots reaching into structs; an exact name comes first."""
        if name in self.fields:
            return True
        columns: Columns | None = self
        for part in name.split("."):
            if columns is None:
                return True
            if part not in columns.fields:
                return False
            columns = columns.fields[part]
        return True

    def names(self) -> Iterator[str]:
        """All columns, each followed by its fields with dots."""
        for name, fields in self.fields.items():
            yield name
            if fields is not None:
                yield from (f"{name}.{inner}" for inner in fields.names())

    def merged(self, other: Columns) -> Columns:
        """The columns of both."""
        shared = {
            name: None if (inner := self.fields[name]) is None or fields is None else inner.merged(fields)
            for name, fields in other.fields.items()
            if name in self.fields
        }
        return Columns(self.fields | other.fields | shared)


def flat(names: Sequence[str]) -> Columns:
    """Columns that hold no structs."""
    return Columns(dict.fromkeys(names, Columns()))


def columns_of(
    path: Path, splits: Sequence[str] = (), role: Role = "train", apart: Collection[FileId] = frozenset()
) -> Columns | None:
    """Columns of a data file, or of the first with rows that is read of a directory (see `dataset_files.choose`).

    None where they cannot be found cheaply. Raises UnreadableDataError for what is missing, empty or broken.
    """
    if not exists(path):
        raise UnreadableDataError(f"{path} does not exist", home_hint(str(path)))
    try:
        if not path.is_dir():
            return _file_columns(path)
        *others, last = choose(path, splits, role, apart).read
        for file in others:
            with suppress(NoRowsError):
                return _with_folders(path, file)
        return _with_folders(path, last)
    except OSError as error:
        raise UnreadableDataError(f"{path} cannot be read: {error.strerror or error}") from None


def folder_columns(directory: Path, file: Path) -> dict[str, str | None]:
    """The columns that folders between a directory and a file in it hold, as text: `lang` of `lang=en/a.parquet`."""
    pairs = (folder.partition("=") for folder in file.relative_to(directory).parts[:-1])
    values = {name: unquote(value) for name, equals, value in pairs if name and equals}
    return {name: None if value == _NO_VALUE else value for name, value in values.items()}


def _with_folders(directory: Path, file: Path) -> Columns | None:
    columns = _file_columns(file)
    return columns and flat([*folder_columns(directory, file)]).merged(columns)


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


def _file_columns(path: Path) -> Columns | None:
    """Columns of one file. Raises UnreadableDataError, OSError."""
    if not path.is_file():
        raise UnreadableDataError(f"{path} is a pipe or a device", "write the data to a file first")
    if path.suffix.lower() in TABLES:
        return _arrow_columns(path)
    if delimiter_of(path):
        return _csv_columns(path)
    if data_suffix(path.name):
        return _json_columns(path)
    raise UnreadableDataError(f"{path} is not a dataset", f"a data file ends in {DATA_FORMATS}")


@contextmanager
def open_table(path: Path) -> Iterator[Any]:
    """A Parquet or Arrow file, open: pyarrow's reader of it.

    Raises UnreadableDataError where pyarrow cannot read it, now or later; OSError where the file cannot be opened.
    """
    is_parquet = path.suffix.lower() == ".parquet"
    with path.open("rb") as file:  # a clear system error before pyarrow's
        magic = file.read(6)
    import pyarrow as pa  # a tenth of a second
    import pyarrow.parquet as pq

    try:
        if is_parquet:
            # Read by pieces: whole chunks of columns, as by default, are the whole file where it has one row group.
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=PIECE_BYTES) as table:
                yield table
        else:
            opened = pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream
            with pa.memory_map(str(path)) as memory, opened(memory) as table:
                yield table
    except (pa.ArrowException, OSError) as error:
        kind = "parquet" if is_parquet else "Arrow"
        raise UnreadableDataError(f"{path} is not a readable {kind} file: {error}") from None


def _arrow_columns(path: Path) -> Columns | None:
    """Columns of a parquet or Arrow file. Raises UnreadableDataError, OSError."""
    with open_table(path) as table:
        is_parquet = hasattr(table, "schema_arrow")
        schema = table.schema_arrow if is_parquet else table.schema
        if is_parquet and table.metadata.num_rows == 0:
            raise NoRowsError(f"{path} has no rows")
    return Columns({item.name: _arrow_fields(item.type) for item in schema})


def _arrow_fields(kind: Any) -> Columns | None:
    from pyarrow import types

    if types.is_struct(kind):
        return Columns({item.name: _arrow_fields(item.type) for item in kind})
    is_open = types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind) or types.is_map(kind)
    is_json = getattr(kind, "extension_name", "") == "arrow.json"
    return None if is_open or is_json else Columns()  # a text may hold JSON


def _csv_columns(path: Path) -> Columns:
    """The columns that the header names, with the fields of JSON texts in the first rows."""
    with open_text(path) as file:
        rows = csv_rows(file, delimiter_of(path))
        if (header := csv_header(rows, str(path))) is None or (first := next(rows, None)) is None:
            raise NoRowsError(f"{path} has no rows")
        columns = flat(header)
        for _, cells, fault in (first, *islice(rows, FIRST_ROWS - 1)):
            if not fault and not csv_fault(cells, header):
                columns = columns.merged(Columns(dict(zip(header, map(_json_fields, cells), strict=True))))
    return columns


def _json_columns(path: Path) -> Columns | None:
    """Keys of the first objects of a list, or of the first lines."""
    with open_text(path) as file:
        head = file.read(FIRST_ROW_BYTES)
    text = head.decode("utf-8-sig", errors="replace").strip()
    if not text or (text[0] == "[" and text[1:].strip() == "]"):
        raise NoRowsError(f"{path} is empty")
    columns, at = Columns(), int(text[0] == "[")
    for number in range(FIRST_ROWS):
        try:
            row, at = json.JSONDecoder().raw_decode(text, _BETWEEN.match(text, at).end())  # type: ignore[union-attr]
            if not isinstance(row, dict):
                raise ValueError(f"it is {type(row).__name__}")
        except (ValueError, RecursionError) as error:
            if number:
                break  # the end, or what the loader reports
            if len(head) == FIRST_ROW_BYTES:
                return None
            raise UnreadableDataError(f"{path} does not begin with a JSON object: {error}") from None
        columns = columns.merged(Columns({name: _json_fields(value) for name, value in row.items()}))
    return columns


def _json_fields(value: Any) -> Columns | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return Columns()
    if isinstance(value, dict):
        return Columns({name: _json_fields(inner) for name, inner in value.items()})
    return None if value is None else Columns()
