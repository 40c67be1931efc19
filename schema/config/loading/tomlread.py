"""One TOML file: its values, and where each key stands. What cannot be read is a ConfigError with the remedy."""

from __future__ import annotations

import errno
import re
import tomllib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.config.loading.other_systems import other_systems
from schema.config.loading.positions import Position, locate, nearest
from schema.config.paths import NotAFileError, read_regular
from schema.config.problem import ConfigError, KeyPath, Problem, format_key

MAX_FILE_BYTES = 1024 * 1024  # a configuration is a few kilobytes; more is the wrong file
MAX_DEPTH = 64  # tables in tables: the schema needs seven, and what copies and merges them is recursive
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_.-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_DEPTH}}}")
NAMED = 3  # parts of a key that is too deep to be named whole


@dataclass(frozen=True)
class TomlFile:
    """name: the path as it was given. positions: key path -> (line, column), both from 1."""

    name: str
    data: dict[str, Any]
    positions: dict[KeyPath, Position]


def read_toml(path: Path) -> TomlFile:
    """Read and parse a file. Raises ConfigError: not there, no text, not TOML."""
    text = read_text(path)
    data = _parse(text, str(path))
    try:
        positions = locate(text)
    except (ValueError, IndexError, RecursionError):
        positions = {}  # a place is a courtesy: without it the key still names the fault
    if (deep := too_deep(data)) is not None:
        place = nearest(positions, deep)
        raise ConfigError([depth_problem(deep).at(str(path), *(place or ()))])
    return TomlFile(str(path), data, positions)


def parse_toml(text: str) -> dict[str, Any]:
    """A text as TOML. Raises ValueError, RecursionError.

    A dotted key of n parts costs tomllib n^2, so a longer one than any table may be deep is refused unparsed.
    """
    if match := _LONG_KEY.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ValueError(f"nested too deeply: a key of more than {MAX_DEPTH} parts (at line {line}, column 1)")
    return tomllib.loads(text)


def too_deep(data: Any) -> KeyPath | None:
    """The beginning of the first key that tables and lists nest more than MAX_DEPTH deep; None: all is well."""
    level: list[tuple[KeyPath, Any]] = [((), data)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[KeyPath, Any]] = []
        for path, item in level:
            if isinstance(item, dict):
                inner += [((*path, str(key))[:NAMED], value) for key, value in item.items()]
            elif isinstance(item, list):
                inner += [(path, value) for value in item]
        level = inner
    return next((path for path, item in level if isinstance(item, dict | list)), None)


def depth_problem(path: KeyPath) -> Problem:
    """Describe the fault of a key that `too_deep` has found."""
    message = f"nested too deeply: more than {MAX_DEPTH} tables or lists in one another"
    return Problem(format_key(path), message, hint="no key needs that; is it the right file?")


_ITEM = re.compile(r"\[(\d{1,6})\]")


def dotted_path(name: str) -> KeyPath | None:
    """A dotted key as its parts, the first ones of too many; None for what is not a key.

    Quoted parts are allowed, and items of lists: `teacher[0].weight`.
    """
    if not _ITEM.search(name) or '"' in name or "'" in name:
        return _plain_path(name)
    path: KeyPath = ()
    for place, part in enumerate(_ITEM.split(name)):
        if place % 2:
            path = (*path, int(part))
        elif part:
            inner = _plain_path(part.removeprefix(".") if path else part)
            if inner is None or (path and not part.startswith(".")):
                return None
            path = (*path, *inner)
        elif not path:
            return None
    return path[: MAX_DEPTH + 1]


def _plain_path(name: str) -> tuple[str, ...] | None:
    """A dotted key without items."""
    if match := _LONG_KEY.match(name):
        return tuple(match.group().split(".")[: MAX_DEPTH + 1])
    try:
        value: Any = parse_toml(f"{name} = 0") if "\n" not in name else 0
    except (ValueError, RecursionError):
        return None
    path: tuple[str, ...] = ()
    while isinstance(value, dict):
        if len(value) != 1:
            return None
        ((part, value),) = value.items()
        path = (*path, part)
    return path or None


def parse_value(text: str) -> Any:
    """A value as TOML writes it; what is not TOML is a string."""
    text = text.strip()
    try:
        parsed = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def read_text(path: Path, kind: str = "TOML") -> str:
    """The text of a file, of MAX_FILE_BYTES at most. Raises ConfigError with the reason and the remedy."""
    file = str(path)

    def refused(message: str, hint: str = "") -> ConfigError:
        return ConfigError([Problem("", message, file=file, hint=hint)])

    try:
        content = read_regular(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        hint = f"give the path of a {kind} file, relative to the current directory"
        raise refused("no such file", hint) from None
    except IsADirectoryError:
        hint = f"give the path of a {kind} file" + _one_inside(path)
        raise refused("cannot be read: Is a directory", hint) from None
    except NotAFileError as error:
        raise refused(f"cannot be read: {error}", "write it to a file first, and give its path") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            hint = "a configuration is a few kilobytes: is it the right file?"
            raise refused(f"larger than {MAX_FILE_BYTES} bytes: not a configuration", hint) from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise refused(f"cannot be read: {reason}") from None
    if b"\0" in content and not content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise refused("a binary file, not a text", f"give the path of a {kind} file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refused(f"not a text in UTF-8 (byte {error.start})", "save the file as UTF-8") from None


def _one_inside(directory: Path) -> str:
    files = sorted(directory.glob("*.toml"))
    return f", such as {files[0]}" if files else ""


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except RecursionError:
        raise ConfigError([Problem("", "broken TOML: nested too deeply", file=file)]) from None
    except ValueError as error:
        raise ConfigError([other_systems().recognise(text, file) or _broken(str(error), text, file)]) from None


_SMALLER = "write numbers below 2^63"


def _broken(message: str, text: str, file: str) -> Problem:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    lines = text.split("\n")
    if place:
        line, column = int(place[1]), int(place[2])
        message = message[: place.start()]
    elif message.endswith(" (at end of document)"):
        line, column = len(lines), len(lines[-1]) + 1
        message = message.removesuffix(" (at end of document)") + " at the end of the file"
    elif message.startswith("Exceeds the limit"):  # Python's words, which name a function of Python
        return Problem("", "broken TOML: an integer of thousands of digits", hint=_SMALLER, file=file)
    else:
        return Problem("", f"broken TOML: {message}", file=file)
    written = lines[line - 1] if line <= len(lines) else ""
    hint = _json_hint(text) or _toml_hint(written)
    return Problem("", f"broken TOML: {message}", hint=hint, file=file, line=line, column=column)


def _json_hint(text: str) -> str:
    is_json = text.lstrip().startswith("{")
    return "this is JSON; the configuration is TOML (cosmos-launch init begins one)" if is_json else ""


def _toml_hint(line: str) -> str:
    """Suggest what people most often mean by a line that is not TOML."""
    value = line.partition("=")[2].partition("#")[0].strip()
    if value in ("True", "False"):
        return f"TOML writes {value.lower()}"
    if value.lower() in ("none", "null", "nil", "~"):
        return "TOML has no null: leave the key out"
    if ":" in line and "=" not in line:
        return "TOML writes key = value, not key: value"
    if value and re.match(r"^[A-Za-z./~]", value) and value not in ("true", "false"):
        return f'a string needs quotes: "{value}"'
    return ""
