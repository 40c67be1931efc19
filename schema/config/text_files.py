"""Data files that are text: decompressed as they are read, and CSV taken apart into rows.

    open_text(path) ─▶ bytes, also of .gz, .zst, .bz2 and .xz       csv_rows(file, delimiter) ─▶ line, cells, fault

A cell of CSV is text, whatever it looks like: `007` is not 7, and an empty cell is an empty text.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from schema.config.data_files import UnreadableDataError
from schema.config.paths import COMPRESSIONS, data_suffix

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Separators of cells, by the ending of the file."""
MOST_CHARACTERS = 64 * 1024 * 1024
"""Characters of a cell: some hundred times those of 100,000 tokens, and a quote that is never closed ends there."""
_BLOCK = 256 * 1024
_FAULTS = {
    "unexpected end of data": "a cell begins with a quote that is never closed",
    "field larger": f"a cell has more than {MOST_CHARACTERS:,} characters: a quote may not be closed",
    "new-line character": "a carriage return stands alone: lines must end in \\n or \\r\\n, and such cells be quoted",
}
_UTF16 = ("0xff in position 0", "0xfe in position 0")


def compression_of(path: Path) -> str:
    """The ending that says how a text file is compressed; "": it is not."""
    suffix = data_suffix(path.name)
    return next((ending for ending in COMPRESSIONS if suffix.endswith(ending)), "")


def delimiter_of(path: Path) -> str:
    """The separator of cells of a file of CSV or TSV; "": it is another format."""
    return DELIMITERS.get(data_suffix(path.name).removesuffix(compression_of(path)), "")


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed while they are read.

    Raises UnreadableDataError for a compressed stream that is damaged or ends too early, now or later; OSError where
    the file cannot be opened.
    """
    kind = compression_of(path)
    with path.open("rb") as file:  # a clear system error before a library's
        if not kind:
            yield file
            return
        try:
            with _decompressed(file, kind) as stream:
                yield stream
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            hint = f"fetch or write it again; a file that is not compressed must not end in {kind}"
            raise UnreadableDataError(
                f"{path} is damaged, or is not a whole {kind} file: {error or type(error).__name__}", hint
            ) from None


def _decompressed(file: IO[bytes], kind: str) -> IO[bytes]:
    if kind == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if kind == ".bz2":
        return cast(IO[bytes], bz2.open(file))
    if kind == ".xz":
        return cast(IO[bytes], lzma.open(file))
    import pyarrow as pa  # its decompressor reports a stream that ends within a frame

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"), _BLOCK)


def lines_of(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file without the mark that some programs put before UTF-8."""
    rest = iter(file)
    for first in rest:
        yield first.removeprefix(codecs.BOM_UTF8)
        break
    yield from rest


class _Decoded:
    """Lines as text; `fault` says what is wrong with those since it was last emptied."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines, self.fault = lines, ""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self.fault = f"not valid UTF-8: {error}"
            return line.decode(errors="replace")


def csv_rows(file: Iterable[bytes], delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    """Each row with the number of its first line and what is wrong with it ("": nothing); blank lines are none."""
    csv.field_size_limit(max(csv.field_size_limit(), MOST_CHARACTERS))
    text = _Decoded(lines_of(file))
    reader: Any = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        line, cells, fault = reader.line_num + 1, [], ""
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fault = next((words for start, words in _FAULTS.items() if str(error).startswith(start)), str(error))
        fault, text.fault = text.fault or fault, ""
        if cells or fault:
            yield line, cells, fault


def csv_header(rows: Iterator[tuple[int, list[str], str]], name: str) -> list[str] | None:
    """The columns by the first row; None: it has no row. Raises UnreadableDataError. name: of the file."""
    line, cells, fault = next(rows, (0, [], ""))
    if fault:
        fault += "; it looks like UTF-16" if any(mark in fault for mark in _UTF16) else ""
        raise UnreadableDataError(f"{name}, line {line}: the header cannot be read: {fault}", "write UTF-8")
    for number, cell in enumerate(cells, 1):
        if not cell.strip():
            hint = "name it, or leave it out (pandas: to_csv(…, index=False))"
            raise UnreadableDataError(f"{name}: column {number} has no name in the header, line {line}", hint)
        if cell in cells[: number - 1]:
            raise UnreadableDataError(f"{name}: the header, line {line}, names {cell!r} twice", "rename all but one")
    return cells or None


def csv_fault(cells: list[str], header: list[str]) -> str:
    """Why a row does not fit its header; "": it does."""
    return "" if len(cells) == len(header) else f"{len(cells)} cells, and the header names {len(header)} columns"
