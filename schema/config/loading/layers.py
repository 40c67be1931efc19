"""The layers of a configuration, and who wrote each value.

    defaults  <  file  <  file  <  …  <  environment  <  --set

Invariant: `origins` names, for every key, table and item of `data`, the layer that wrote it last; what it does
not name is a default.

A table of a file is merged with that of the files before it, key by key, unless the file's own list `replace` names
it (`replace = ["train.train_policy.reward_function"]`). Everything else replaces what was there as a whole: a list, a
value, and whatever one variable or one --set writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from schema.config.loading.environment import written_in
from schema.config.loading.explain import Finding
from schema.config.loading.positions import nearest
from schema.config.loading.tomlread import (
    MAX_DEPTH,
    NAMED,
    TomlFile,
    depth_problem,
    dotted_path,
    parse_value,
    read_toml,
)
from schema.config.problem import MOST_SHOWN, ConfigError, KeyPath, Problem, format_key

REPLACE = "replace"
"""A file's list of the tables that it replaces as a whole."""


@dataclass(frozen=True)
class Origin:
    """The origin of a value. name: a file, a variable of the environment, or the text of a --set.

    layer: its rank, later ones win. line, column (from 1) of a key in a file.
    """

    kind: Literal["file", "environment", "set"]
    name: str
    layer: int
    line: int | None = None
    column: int | None = None

    @property
    def source(self) -> str:
        """The name that problems use for the file."""
        prefix = {"file": "", "environment": "environment variable ", "set": "--set "}
        return prefix[self.kind] + self.name


@dataclass
class Layers:
    """The values that the user wrote, all layers in one.

    problems: what could not be written into it. warnings: what was left out of it, as it has no effect.
    """

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin | None:
        """Return the origin of exactly this key, or None for a default."""
        return self.origins.get(path)

    def placed(self, findings: Sequence[Finding]) -> list[Problem]:
        """The first MOST_SHOWN with their place, in the order of the layers and of the lines within a file."""
        ranked = [(nearest(self.origins, path), problem) for path, problem in findings]
        ranked.sort(key=lambda pair: _rank(pair[0]))
        last = self.files[-1] if self.files else None
        return [
            problem().at(origin.source, origin.line, origin.column) if origin else problem().at(last)
            for origin, problem in ranked[:MOST_SHOWN]
        ]

    def writers(self, path: KeyPath) -> list[Origin]:
        """Return the origins of a key and of all keys in it, each once; empty for a default."""
        value = _at(self.data, path)
        origins = (self.origins[inner] for inner in (*_inside(value, path), path) if inner in self.origins)
        return list({(origin.layer, origin.name): origin for origin in origins}.values())

    def merge(self, file: TomlFile, layer: int) -> None:
        """Lay a file over what is there."""

        def origin(path: KeyPath) -> Origin:
            line, column = file.positions.get(path, (None, None))
            return Origin("file", file.name, layer, line, column)

        self.files.append(file.name)
        data = without_port(file.data)
        if data is not file.data:
            by = origin(("redis",))
            self.warnings.append(_PORT.at(by.source, by.line, by.column))
        data = dict(data)
        if REPLACE in data:
            self._forget(data.pop(REPLACE), data, origin)
        self._merge_table(self.data, data, (), origin)

    def _forget(self, names: Any, data: Mapping[str, Any], origin: Any) -> None:
        """Take the tables that a file replaces out of what is there; what cannot be meant is a problem."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            by = origin((REPLACE,))
            problem = Problem(REPLACE, "expected a list of tables", names, f'write {REPLACE} = ["train.ckpt"]')
            self.problems.append(problem.at(by.source, by.line, by.column))
            return
        for index, name in enumerate(names):
            by, path = origin((REPLACE, index)), dotted_path(name) or ()
            if not path or not isinstance(_at(data, path), dict):
                hint = "write the table in this file too, or take its name out"
                problem = Problem(REPLACE, f"this file does not have the table {name}", name, hint)
                self.problems.append(problem.at(by.source, by.line, by.column))
            elif _at(self.data, path) is None:
                message = f"has no effect: no file before this one has the table {name}"
                problem = Problem(REPLACE, message, name, "take its name out, or put this file behind the other")
                self.warnings.append(problem.at(by.source, by.line, by.column))
            else:
                for inside in [path, *_inside(_at(self.data, path), path)]:
                    self.origins.pop(inside, None)
                del _at(self.data, path[:-1])[path[-1]]

    def _merge_table(self, into: dict[str, Any], table: Mapping[str, Any], path: KeyPath, origin: Any) -> None:
        for key, value in table.items():
            inner = (*path, key)
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self.origins[inner] = origin(inner)
                self._merge_table(into[key], value, inner, origin)
            else:
                self._replace(into, inner, value, origin)

    def _replace(self, into: Any, path: KeyPath, value: Any, origin: Any) -> None:
        part = path[-1]
        if part < len(into) if isinstance(part, int) else part in into:
            for inside in [path, *_inside(into[part], path)]:
                self.origins.pop(inside, None)
        _put(into, part, value)
        for inside in [path, *_inside(value, path)]:
            self.origins[inside] = origin(inside)

    def assign(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Write one key, with the tables around it; a value in the place of a table is a problem."""
        if len(path) > MAX_DEPTH:
            self.problems.append(depth_problem(path[:NAMED]).at(origin.source[:80]))
            return
        table: Any = self.data
        for end, part in enumerate(path):
            container, kind = (list, "a list") if isinstance(part, int) else (dict, "a table")
            fault = "" if isinstance(table, container) else f"is not {kind}"
            if not fault and isinstance(part, int) and part > len(table):
                fault = f"has {len(table)} items: the next one is [{len(table)}]"
            if fault:
                name = format_key(path[:end])
                self.problems.append(Problem(name, f"{name} {fault}", value, file=origin.source))
                return
            if end + 1 == len(path):
                break
            if part == len(table) if isinstance(part, int) else part not in table:
                _put(table, part, [] if isinstance(path[end + 1], int) else {})
                self.origins[path[: end + 1]] = origin
            table = table[part]
        self._replace(table, path, value, lambda _: origin)


def read_layers(paths: Sequence[Path], overrides: Sequence[str], env: Mapping[str, str] | None = None) -> Layers:
    """Read files, environment (None: none) and overrides. Raises ConfigError for files that cannot be read."""
    layers = Layers()
    broken: list[Problem] = []
    for path in paths:
        try:
            layers.merge(read_toml(path), len(layers.files))
        except ConfigError as error:
            broken += error.problems
    if broken:
        raise ConfigError(broken)
    number = len(paths)
    environment = written_in(env or {})
    layers.problems += environment.problems
    for variable in environment.variables:
        origin = Origin("environment", variable.name, number)
        layers.assign(variable.path, parse_value(variable.text), origin)
    for text in overrides:
        origin = Origin("set", text, number + 1)
        name, equals, written = text.partition("=")
        key = dotted_path(name)
        if equals and key is not None:
            layers.assign(key, parse_value(written), origin)
        else:
            message, hint = "not of the form dotted.key=value", "for example --set train.optm_lr=1e-5"
            layers.problems.append(Problem("", message, text, hint, file=origin.source))
    return layers


_PORT = Problem(
    "redis",
    "the port on which cosmos-rl starts its own server: it has no effect, the embedded server has a socket",
    hint='leave it out; a server of your own is [redis] url = "redis://host:port"',
)


def without_port(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration without `redis` as cosmos-rl's files have it, a port or nothing; else the same object."""
    port = data.get("redis")
    if isinstance(port, str) and (port == "" or (port.isascii() and port.isdigit() and len(port) <= 5)):
        return {key: value for key, value in data.items() if key != "redis"}
    return data


def _put(into: Any, part: str | int, value: Any) -> None:
    """Write a key of a table, an item of a list, or the next item of it."""
    if isinstance(part, int) and part == len(into):
        into.append(value)
    else:
        into[part] = value


def _at(table: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None."""
    for part in path:
        if not isinstance(table, dict) or part not in table:
            return None
        table = table[part]
    return table


def _inside(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """The paths of everything inside a table or list."""
    todo = [(value, path)]
    while todo:
        value, path = todo.pop()
        items: Any = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list):
            items = enumerate(value)
        for key, item in items:
            yield (*path, key)
            todo.append((item, (*path, key)))


def _rank(origin: Origin | None) -> tuple[int, int, int]:
    return (origin.layer, origin.line or 0, origin.column or 0) if origin else (-1, 0, 0)
