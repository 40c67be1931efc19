"""The columns of a local dataset, from its metadata or its first row: nothing is loaded whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from schema.config.paths import DATA_SUFFIXES, data_files, exists, home_hint

FIRST_ROW_BYTES = 4 * 1024 * 1024  # a first row longer than this is left for the loader to judge


class UnreadableDataError(ValueError):
    """The data cannot be used; the text says why, `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def columns_of(path: Path, splits: Sequence[str], default_splits: Sequence[str]) -> set[str] | None:
    """Column names of a parquet, jsonl or json file, or of a directory's first such file of the splits.

    None where they cannot be told cheaply. Raises UnreadableDataError for what is missing, empty or broken.
    """
    if not exists(path):
        raise UnreadableDataError(f"{path} does not exist", home_hint(str(path)))
    try:
        if path.is_dir():
            files = data_files(path, splits, default_splits)
            if not files:
                wanted = f" of split {', '.join(splits)}" if splits else ""
                raise UnreadableDataError(f"{path} holds no data file{wanted} ({', '.join(DATA_SUFFIXES)})")
            path = files[0]
        if path.suffix == ".parquet":
            return _parquet_columns(path)
        if path.suffix in DATA_SUFFIXES:
            return _json_columns(path)
    except OSError as error:
        raise UnreadableDataError(f"{path} cannot be read: {error.strerror or error}") from None
    raise UnreadableDataError(f"{path} is not a dataset", f"a data file ends in {', '.join(DATA_SUFFIXES)}")


def _parquet_columns(path: Path) -> set[str] | None:
    with path.open("rb") as file:  # a clear system error before pyarrow's
        if file.read(4) != b"PAR1":
            raise UnreadableDataError(f"{path} is not a parquet file")
    try:
        from pyarrow import parquet
    except ImportError:  # the base install has no pyarrow; the worker that reads the data has
        return None
    try:
        metadata = parquet.read_metadata(path)
    except (ValueError, OSError) as error:
        raise UnreadableDataError(f"{path} is a broken parquet file: {error}") from None
    if metadata.num_rows == 0:
        raise UnreadableDataError(f"{path} has no rows")
    return set(metadata.schema.to_arrow_schema().names)


def _json_columns(path: Path) -> set[str] | None:
    """Keys of the first object of a list, or of the first line."""
    with path.open("rb") as file:
        head = file.read(FIRST_ROW_BYTES)
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text:
        raise UnreadableDataError(f"{path} is empty")
    text = text[1:].lstrip() if text.startswith("[") else text
    try:
        row, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        if len(head) == FIRST_ROW_BYTES:
            return None
        raise UnreadableDataError(f"{path} does not begin with a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise UnreadableDataError(f"{path} does not begin with a JSON object")
    return set(row)
