"""Where each key of a TOML text stands: key path -> (line, column), both from 1.

`tomllib` keeps no positions, so this scanner walks a text that tomllib has already accepted. It therefore
checks nothing: it only has to find where keys begin and where values end. Items of arrays are recorded by
their index, tables also where a dotted key or a longer header implies them first.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from typing import TypeVar

from schema.config.problem import KeyPath

T = TypeVar("T")
Position = tuple[int, int]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)


def locate(text: str) -> dict[KeyPath, Position]:
    """Positions of all keys, tables and array items of a valid TOML text."""
    return _Scanner(text).scan()


def nearest(written: Mapping[KeyPath, T], path: KeyPath) -> T | None:
    """Return the entry of a key, or of the nearest table around it that is written; None for the whole file."""
    around = (path[:end] for end in range(len(path), 0, -1))
    return next((written[part] for part in around if part in written), None)


class _Scanner:
    """One pass over the text; `_at` is the reading position."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._found: dict[KeyPath, Position] = {}
        self._array_tables: dict[KeyPath, int] = {}

    def scan(self) -> dict[KeyPath, Position]:
        table: KeyPath = ()
        self._skip(_GAP)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._assignment(table)
            self._skip(_GAP)
        return self._found

    def _header(self) -> KeyPath:
        start = self._at
        is_array = self._text.startswith("[[", start)
        self._at += 2 if is_array else 1
        parts = self._key()
        self._at += 2 if is_array else 1
        path: KeyPath = ()
        for index, part in enumerate(parts):
            path += (part,)
            self._record(path, start)
            if is_array and index == len(parts) - 1:
                self._array_tables[path] = self._array_tables.get(path, -1) + 1
            if path in self._array_tables:
                path += (self._array_tables[path],)
                self._record(path, start)
        return path

    def _assignment(self, table: KeyPath) -> None:
        start = self._at
        path = table
        for part in self._key():
            path += (part,)
            self._record(path, start)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _key(self) -> list[str]:
        """The parts of a dotted key; stops at the character after it."""
        parts: list[str] = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] in "\"'":
                quoted = self._take(_STRING)
                parts.extend(tomllib.loads(f"{quoted} = 0"))
            else:
                parts.append(self._take(_BARE))
            self._skip(_BLANK)
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        first = self._text[self._at]
        if first in "\"'":
            self._take(_STRING)
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            self._take(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        self._skip(_GAP)
        while self._text[self._at] != "]":
            self._record((*path, index), self._at)
            self._value((*path, index))
            index += 1
            self._separator()
        self._at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        self._skip(_GAP)
        while self._text[self._at] != "}":
            self._assignment(path)
            self._separator()
        self._at += 1

    def _separator(self) -> None:
        self._skip(_GAP)
        if self._text[self._at] == ",":
            self._at += 1
            self._skip(_GAP)

    def _record(self, path: KeyPath, offset: int) -> None:
        line = bisect_right(self._lines, offset)
        self._found.setdefault(path, (line, offset - self._lines[line - 1] + 1))

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._take(pattern)

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"no TOML token at offset {self._at}")
        self._at = match.end()
        return match.group()
