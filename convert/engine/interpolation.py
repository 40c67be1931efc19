"""`${…}` as OmegaConf resolves it, without evaluating anything.

    ${a.b.c}            the value of another key, from the top
    ${.x}  ${..x}       the same, from the table that holds this key, or from the one around it
    ${oc.env:NAME}      an environment variable, `${oc.env:NAME,default}` with a default
    ${oc.select:a.b,d}  another key, or d where there is none
    ${oc.deprecated:a}  another key
    ${oc.decode:text}   the value that YAML reads in a text; `${oc.create:…}` likewise
    ${oc.dict.keys:a}   the names in a table as a list; `${oc.dict.values:a}` its values
    ${hydra:a.b}        what the file's own table `hydra` says; `${hydra:runtime.cwd}` is the current directory, `.`
    ${now:%Y%m%d}       the word `now`: a conversion is the same at any time

A value that is one interpolation takes the type of what it names; inside a longer text it becomes text. What depends
on the environment or on the time goes to `warn`, too. The table `hydra` stays as it is written: Hydra alone reads it.
Anything else between `${` and `}` is an error with its line: guessing would be worse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.engine.keys import Path, dotted, split_key
from schema.config.loading.yamlread import read_yaml, scalar
from schema.config.problem import ConfigError, Problem

_ABSENT = object()
_HYDRA = "hydra"
_NOW = "now"
_KEY = re.compile(r"\.*[^\s${}:,.\"'\[\]]+(?:\.[^\s${}:,.\"'\[\]]+|\[[^\s\]]+\])*")
_REFERENCE = re.compile(
    r"\$\{(?:oc\.(?:select|deprecated|dict\.keys|dict\.values):)?\s*([^\s${}:,.\"'\[\]]+)[^${}]*\}"
)
MAX_NESTING = 16  # of one interpolation inside another
MAX_RESOLVED = 20_000  # values that references may expand to; verl's longest file has 900
MAX_TEXT = 64 * 1024  # of one resolved text; a path has a few hundred characters
MAX_PROBLEMS = 20  # more at once help nobody, and a broken file can have thousands
MAX_CHAIN = 64  # of one reference to the next; verl's files have chains of three


def resolve(
    data: Mapping[str, Any],
    lines: Mapping[Path, int],
    name: str,
    env: Mapping[str, str],
    defaults: Mapping[str, Any],
    absent: str = "",
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """`data` with every interpolation replaced by what it names.

    env: the environment that `oc.env` reads. defaults: by dotted key, what the other system has where the
    file is silent. absent: the hint for a key that is not there. warn: gets a sentence for what depends on the
    environment or on the time. Raises ConfigError with all unresolvable references, each with its line.
    """
    resolver = _Resolver(data, lines, name, env, defaults, absent, warn)
    resolved = {key: value if key == _HYDRA else resolver.value((key,), value) for key, value in data.items()}
    if resolver.problems:
        raise ConfigError(resolver.problems)
    return resolved


def references(data: Mapping[str, Any]) -> frozenset[str]:
    """The keys at the top that others take their value from: by a reference alone, or by one within a text of text.

    A number within a text is not among them: `exp_name: run-${coef}` names the run after a key that acts itself.
    """
    names: set[str] = set()
    values: list[Any] = list(data.values())
    while values:
        value = values.pop()
        if isinstance(value, Mapping | list):
            values += value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, str):
            for match in _REFERENCE.finditer(value):
                top = data.get(match[1])
                if match[0] == value or isinstance(top, str | Mapping | list):
                    names.add(match[1])
    return frozenset(names)


class _Unresolvable(Exception):
    """The reason why a reference has no value."""


class _AbsentError(_Unresolvable):
    """It names a key that is not there."""


@dataclass
class _Resolver:
    data: Mapping[str, Any]
    lines: Mapping[Path, int]
    name: str
    env: Mapping[str, str]
    defaults: Mapping[str, Any]
    absent: str
    warn: Callable[[str], None]
    problems: list[Problem] = field(default_factory=list)
    _open: list[Path] = field(default_factory=list)  # keys being resolved: one that comes again is a cycle
    _budget: int = MAX_RESOLVED  # references to tables copy them: what that may grow to is bounded

    def value(self, path: Path, value: Any) -> Any:
        """A value with its interpolations resolved; where one fails, the problem is noted and None stands."""
        if isinstance(value, Mapping):
            return {key: self.value((*path, key), item) for key, item in value.items()}
        if len(self.problems) >= MAX_PROBLEMS:
            return None
        try:
            return self._resolved(path, value)
        except _Unresolvable as error:
            where = self.lines.get(path) or self.lines.get(path[:-1])
            hint = self.absent if isinstance(error, _AbsentError) else ""
            self.problems.append(Problem(dotted(path), str(error), value, hint, file=self.name, line=where))
            return None

    def _resolved(self, path: Path, value: Any) -> Any:
        self._budget -= 1
        if self._budget < 0:
            raise _Unresolvable(f"references expand to more than {MAX_RESOLVED} values")
        if isinstance(value, Mapping):
            return {key: self._resolved((*path, key), item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolved((*path, str(index)), item) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self._open:
            chain = [dotted(part) for part in (*self._open[self._open.index(path) :], path)]
            raise _Unresolvable(f"refers to itself: {' -> '.join(chain)}")
        if len(self._open) >= MAX_CHAIN:
            raise _Unresolvable(f"a chain of more than {MAX_CHAIN} references")
        self._open.append(path)
        try:
            return self._text(path, value, 0)
        finally:
            self._open.pop()

    def _text(self, path: Path, text: str, depth: int) -> Any:
        """A text with its outermost interpolations replaced; alone in the text, one keeps its type."""
        if depth > MAX_NESTING:
            raise _Unresolvable(f"more than {MAX_NESTING} interpolations inside one another")
        pieces: list[Any] = []
        position = 0
        while (start := text.find("${", position)) >= 0:
            end = _closing(text, start)
            if start > position:
                pieces.append(text[position:start])
            pieces.append(self._reference(path, text[start + 2 : end], depth))
            position = end + 1
        if position < len(text):
            pieces.append(text[position:])
        if len(pieces) == 1:
            return pieces[0]
        joined = "".join(map(_as_text, pieces))
        if len(joined) > MAX_TEXT:
            raise _Unresolvable("references expand to a text that is too long")
        return joined

    def _reference(self, path: Path, inner: str, depth: int) -> Any:
        resolver, colon, arguments = inner.partition(":")
        resolver = resolver.strip()
        if colon and resolver in ("oc.env", "oc.select"):
            name, comma, default = arguments.partition(",")
            if "${" in name:  # then the comma may be inside of it
                arguments = _as_text(self._text(path, arguments, depth + 1))
                name, comma, default = arguments.partition(",")
            fall_back = self._default(path, default, depth) if comma else _ABSENT
            if resolver == "oc.env":
                return self._env(path, name.strip(), fall_back)
            return self._maybe(path, name, fall_back)
        if colon and resolver in ("oc.decode", "oc.create"):
            return self._decoded(self._text(path, arguments, depth + 1))
        if "${" in inner:
            inner = _as_text(self._text(path, inner, depth + 1))
        resolver, colon, arguments = (part.strip() for part in inner.strip().partition(":"))
        if not colon:
            return self._named(path, resolver)
        if resolver == _NOW:
            self._note(
                path, f"`{_NOW}` stands for the time of a start in ${{{inner}}}: runs that start later share it"
            )
            return _NOW
        if resolver == "oc.deprecated":
            return self._named(path, arguments.partition(",")[0].strip())
        if resolver in ("oc.dict.keys", "oc.dict.values"):
            table = self._named(path, arguments)
            if not isinstance(table, Mapping):
                raise _Unresolvable(f"{arguments} in ${{{inner}}} is not a table")
            return list(table if resolver == "oc.dict.keys" else table.values())
        if resolver == _HYDRA and (value := self._of_hydra(path, arguments)) is not _ABSENT:
            return value
        raise _Unresolvable(f"`{resolver}` in ${{{inner}}} cannot be resolved here; write the value itself")

    def _named(self, path: Path, key: str) -> Any:
        """The value of the key that a reference names."""
        if not _KEY.fullmatch(key):
            raise _Unresolvable(f"${{{key}}} is not of the form ${{a.b.c}}")
        value = self._select(path, key)
        if value is _ABSENT:
            raise _AbsentError(f"${{{key}}} names a key that is not in the file")
        return value

    def _of_hydra(self, path: Path, key: str) -> Any:
        if key == "runtime.cwd":
            self._note(path, f"${{hydra:{key}}} is the current directory, `.`")
            return "."
        return self._select(path, f"{_HYDRA}.{key}") if _KEY.fullmatch(key) else _ABSENT

    def _decoded(self, text: Any) -> Any:
        """Read a text as YAML. Raises _Unresolvable where it is none."""
        if not isinstance(text, str):
            return text
        try:
            return read_yaml(f"value: {text.strip()}", self.name)[0]["value"]
        except ConfigError as error:
            raise _Unresolvable(f"{text!r} cannot be decoded: {error.problems[0].message}") from None

    def _note(self, path: Path, text: str) -> None:
        self.warn(f"`{dotted(path)}`: {text}")

    def _default(self, path: Path, text: str, depth: int) -> Any:
        """The default of a resolver: a scalar, an empty table or list, or another reference."""
        text = text.strip()
        if "${" in text:
            return self._text(path, text, depth + 1)
        if text in ("{}", "[]"):
            return {} if text == "{}" else []
        return scalar(text) if text[:1] not in ("'", '"') else text.strip("'\"")

    def _maybe(self, path: Path, name: str, default: Any) -> Any:
        value = self._select(path, name.strip())
        if value is _ABSENT:
            return None if default is _ABSENT else default
        return value

    def _env(self, path: Path, name: str, default: Any) -> Any:
        if name in self.env:
            self._note(path, f"holds the value of {name} in the environment of this conversion")
            return self.env[name]  # text, as the environment has it: numbers are read by the keys
        if default is _ABSENT:
            raise _Unresolvable(f"the environment has no {name}: set it, or write ${{oc.env:{name},default}}")
        self._note(path, f"the environment of this conversion has no {name}: the default in the file is taken")
        return default

    def _select(self, path: Path, key: str) -> Any:
        target = _absolute(path, key)
        value: Any = self.data
        for index, part in enumerate(target):
            if isinstance(value, str) and "${" in value:
                value = self._resolved(target[:index], value)
            if isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                return self.defaults.get(dotted(target), _ABSENT)
        return self._resolved(target, value)


def _absolute(path: Path, key: str) -> Path:
    """The path that a reference names; each leading dot beyond the first goes one table up."""
    key = re.sub(r"\[([^\]]*)\]", r".\1", key)
    dots = len(key) - len(key.lstrip("."))
    parts = split_key(key[dots:])
    if not dots:
        return parts
    if dots > len(path):
        raise _Unresolvable(f"${{{key}}} leaves the file")
    return (*path[: len(path) - dots], *parts)


def _closing(text: str, start: int) -> int:
    """Where the `}` of the `${` at `start` stands."""
    depth, position = 0, start
    while position < len(text):
        if text.startswith("${", position):
            depth, position = depth + 1, position + 2
        elif text[position] in "{}":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
            position += 1
        else:
            position += 1
    raise _Unresolvable("a `${` that no `}` closes")


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list):
        raise _Unresolvable("a table or a list cannot stand inside a text")
    return str(value)
