"""From a TOML file to a `Config`, or to a `ConfigError` with everything that is wrong at once.

    text ─tomllib─▶ data ─overrides─▶ data ─pydantic─▶ Config ─rules, availability─▶ Config
                                             │ faults: leave those keys out, go on with the rest
                                             ▼
                                        all problems, with file, line and column

A rule that speaks of a key already found faulty is not asked, so no problem is the echo of another.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from schema.config.availability import check_available
from schema.config.explain import problems_of
from schema.config.positions import Position, locate, nearest
from schema.config.problem import ConfigError, KeyPath, Problem, format_key
from schema.config.root import Config
from schema.config.rules import check_rules

MAX_FILE_BYTES = 16 * 1024 * 1024  # a configuration is a few kilobytes; more is the wrong file


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """Read, override, validate and check a configuration.

    overrides: `dotted.key=VALUE`, VALUE as TOML writes it; what is not TOML is taken as a string.
    Raises ConfigError with all problems.
    """
    path = Path(path)
    text = _read(path)
    data = _parse(text, str(path))
    try:
        positions = locate(text)
    except (ValueError, IndexError, RecursionError):
        positions = {}  # a place is a courtesy: without it the key still names the fault
    sources, faults = _override(data, overrides)
    config, problems = _check(data)
    if config is not None and not problems and not faults:
        return config
    raise ConfigError(faults + _placed(problems, str(path), positions, sources))


def check_config(data: Mapping[str, Any]) -> Config:
    """Validate and check a configuration that is already a mapping; raises ConfigError with all problems."""
    config, problems = _check(data)
    if config is None or problems:
        raise ConfigError([problem for _, problem in problems])
    return config


def _read(path: Path) -> str:
    file = str(path)
    try:
        if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                [Problem("", f"larger than {MAX_FILE_BYTES} bytes: not a configuration", file=file)]
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        hint = "give the path of a TOML file, relative to the current directory"
        raise ConfigError([Problem("", "no such file", file=file, hint=hint)]) from None
    except UnicodeDecodeError as error:
        message = f"not a text in UTF-8 (byte {error.start})"
        raise ConfigError([Problem("", message, file=file, hint="save the file as UTF-8")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([Problem("", f"cannot be read: {reason}", file=file)]) from None


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError([Problem("", "broken TOML: nested too deeply", file=file)]) from None
    except ValueError as error:
        raise ConfigError([_broken(str(error), text, file)]) from None


def _broken(message: str, text: str, file: str) -> Problem:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    lines = text.split("\n")
    if place:
        line, column = int(place[1]), int(place[2])
        message = message[: place.start()]
    elif message.endswith(" (at end of document)"):
        line, column = len(lines), len(lines[-1]) + 1
        message = message.removesuffix(" (at end of document)") + " at the end of the file"
    else:
        return Problem("", f"broken TOML: {message}", file=file)
    written = lines[line - 1] if line <= len(lines) else ""
    return Problem(
        "", f"broken TOML: {message}", hint=_toml_hint(written), file=file, line=line, column=column
    )


def _toml_hint(line: str) -> str:
    """What people most often mean by a line that is not TOML."""
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


def _override(data: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[KeyPath, str], list[Problem]]:
    """Write the overrides into `data`; returns where each key came from, and what cannot be written."""
    sources: dict[KeyPath, str] = {}
    faults: list[Problem] = []
    for text in overrides:
        source = f"--set {text}"
        name, equals, written = text.partition("=")
        path = _override_path(name)
        if not equals or path is None:
            faults.append(Problem("", "not of the form dotted.key=value", text, file=source))
            continue
        table: Any = data
        for part in path[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            message = f"{format_key(path[:-1])} is not a table"
            faults.append(Problem(format_key(path), message, text, file=source))
            continue
        table[path[-1]] = _override_value(written.strip())
        sources[path] = source
    return sources, faults


def _override_path(name: str) -> tuple[str, ...] | None:
    """A dotted key, quoted parts allowed, as its parts."""
    try:
        value: Any = tomllib.loads(f"{name} = 0") if "\n" not in name else 0
    except (ValueError, RecursionError):
        return None
    path: tuple[str, ...] = ()
    while isinstance(value, dict):
        if len(value) != 1:
            return None
        ((part, value),) = value.items()
        path = (*path, part)
    return path or None


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def _check(data: Mapping[str, Any]) -> tuple[Config | None, list[tuple[KeyPath, Problem]]]:
    """The configuration, as far as it is sound, and every problem with its key path."""
    remaining = deepcopy(dict(data))
    problems: list[tuple[KeyPath, Problem]] = []
    config: Config | None = None
    while config is None:
        try:
            config = Config.model_validate(remaining)
        except ValidationError as error:
            faults = problems_of(error, remaining)
            problems += faults
            removed = {_removable(path) for path, _ in faults}
            left = [path for path in removed if not _remove(remaining, path)]
            if left:
                return None, problems
    faulty = [format_key(_removable(path)) for path, _ in problems]
    for problem in [*check_available(config), *check_rules(config)]:
        if not any(_touches(key, bad) for key in (problem.key, *problem.related) for bad in faulty):
            problems.append((_path_of(problem.key), problem))
    return config, problems


def _removable(path: KeyPath) -> KeyPath:
    """What has to go with a faulty key: the list that it is an item of, the section whose tag it is."""
    if path == ("train", "train_policy", "type"):
        return path[:-1]
    end = next((index for index, part in enumerate(path) if isinstance(part, int)), len(path))
    return path[:end]


def _remove(data: Any, path: KeyPath) -> bool:
    """Take a key out; False when there is no such key."""
    for part in path[:-1]:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return isinstance(data, dict) and bool(path) and data.pop(path[-1], None) is not None


def _touches(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other or lies inside it."""
    shorter, longer = sorted((key, other), key=len)
    return longer == shorter or longer.startswith((f"{shorter}.", f"{shorter}["))


def _path_of(key: str) -> KeyPath:
    return _override_path(key) or ()


def _source(path: KeyPath, sources: dict[KeyPath, str]) -> str | None:
    """The override that wrote a key, a table around it, or failing that something inside it."""
    around = [path[:end] for end in range(len(path), 0, -1)]
    inside = [written for written in sources if path and written[: len(path)] == path]
    return next((sources[written] for written in [*around, *inside] if written in sources), None)


def _placed(
    problems: Sequence[tuple[KeyPath, Problem]],
    file: str,
    positions: dict[KeyPath, Position],
    sources: dict[KeyPath, str],
) -> list[Problem]:
    """Problems with their place, in the order of the file; those of overrides after it."""
    placed: list[Problem] = []
    for path, problem in problems:
        source = _source(path, sources)
        place = nearest(positions, path)
        if source is not None:
            placed.append(problem.at(source))
        else:
            placed.append(problem.at(file, *place) if place else problem.at(file))
    return sorted(placed, key=lambda problem: (problem.file != file, problem.line or 0, problem.column or 0))
