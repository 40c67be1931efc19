"""Rules as rows: the key that is blamed, when, what is wrong with it and what to do.

    Refusal("train.ema_decay", lambda c: c.train.ema_decay is not None and not c.launcher.export_final,
            "has no effect: {launcher.export_final=} exports no average",
            "write {launcher.export_final!} = true")

A row is a rule: it takes a configuration, `c`, and yields its problem, or nothing. Its texts name keys, and values as
TOML writes them:

    {}                        the value of the row's key
    {launcher.log_level}      the value of another key; {.name}: of one in the table of the row's key
    {launcher.log_level=}     the key and its value: `launcher.log_level = "info"`
    {launcher.log_level!}     the key
    {launcher.log_level~}     the value as Python writes it
    {sampling_temperature}    a property of the configuration; its sections' too

A text that needs more is a function from the configuration to such a text. A rule that decides between several causes
or remedies is a function, not a row. What users write, a name or a token, comes into a text by its key, not by an
f-string, where braces in it would be read; where no key holds it, the rule makes the `Problem` itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written

S = TypeVar("S")
Rule = Callable[[Config], Iterable[Problem]]

_NAMED = re.compile(r"\{(?P<key>\.?[a-z0-9_.]*)(?P<how>[=!~]?)\}")


@dataclass(frozen=True)
class Row(Generic[S]):
    """A refusal that one condition on a section decides.

    key: the key in the section; of several, each that is not at its default is refused. when: whether the row
    applies. says, hint: what is wrong and what to do, see above. related: other keys that take part in the fault;
    None: those that `says` names with their values.
    """

    key: str | tuple[str, ...]
    when: Callable[[S], bool]
    says: str | Callable[[S], str]
    hint: str | Callable[[S], str] = "leave it out"
    related: tuple[str, ...] | None = None

    def __call__(self, section: S, name: str = "", config: Config | None = None) -> Iterator[Problem]:
        """The problems of a section. name: what the section is called in `config`; "": it is the configuration."""
        if not self.when(section):
            return
        whole: Any = section if config is None else config
        for relative_key in (self.key,) if isinstance(self.key, str) else self.key:
            key = f"{name}.{relative_key}" if name else relative_key
            table, _, last = key.rpartition(".")
            if not isinstance(self.key, str) and not any(written(value_at(whole, table), last)):
                continue
            says = self.says(section) if callable(self.says) else self.says
            hint = self.hint(section) if callable(self.hint) else self.hint
            yield refused(whole, key, says, hint, self.related)


Refusal = Row[Config]
"""A row about the configuration as a whole."""


def refused(
    config: Any, key: str, says: str, hint: str = "leave it out", related: Iterable[str] | None = None
) -> Problem:
    """A problem of a key, for rules that are functions. The texts and `related` are as in a row."""
    named: list[str] = []
    message, remedy = _filled(says, config, key, named), _filled(hint, config, key, [])
    table = key.rpartition(".")[0]
    others = named if related is None else [_absolute(other, table) for other in related]
    return Problem(key, message, value_at(config, key), remedy, related=tuple(others))


def _filled(text: str, config: Any, key: str, named: list[str]) -> str:
    """A text with the keys and values that it names; `named` gets the keys that stand in it with their values."""

    def shown(match: re.Match[str]) -> str:
        other = _absolute(match["key"], key.rpartition(".")[0]) or key
        if match["how"] == "!":
            return other
        value = value_at(config, other)
        if match["how"] == "=":
            named.append(other)
            return f"{other} = {toml_value(value)}"
        return str(value) if match["how"] == "~" else toml_value(value)

    return _NAMED.sub(shown, text)


def _absolute(key: str, table: str) -> str:
    return f"{table}{key}" if key.startswith(".") else key


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key, such as `teacher[0].model`; "": the configuration itself."""
    for part in filter(None, key.split(".")):
        name, _, index = part.rstrip("]").partition("[")
        config = getattr(config, name)
        config = config[int(index)] if index else config
    return config


Sections = Callable[[Config], Iterable[tuple[str, S]]]
"""The sections of one kind that a configuration has, with their keys."""


def section(key: str, get: Callable[[Config], S | None]) -> Sections[S]:
    """The one section that `get` returns, or none; rows are about the keys in it."""

    def sections(config: Config) -> Iterator[tuple[str, S]]:
        if (section := get(config)) is not None:
            yield key, section

    return sections


class Each(Generic[S]):
    """A rule: all rows for each of several sections."""

    def __init__(self, sections: Sections[S], *rows: Row[S]) -> None:
        self.sections, self.rows = sections, rows

    def __call__(self, config: Config) -> Iterator[Problem]:
        for name, section in self.sections(config):
            for row in self.rows:
                yield from row(section, name, config)


class InGrpo:
    """A rule: several, in a job that learns by reinforcement. They may ask for `c.grpo`."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __call__(self, config: Config) -> Iterator[Problem]:
        if config.is_grpo:
            yield from (problem for rule in self.rules for problem in rule(config))


class FirstOf:
    """A rule: of several the first that has something against a configuration."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __call__(self, config: Config) -> list[Problem]:
        return next(filter(None, (list(rule(config)) for rule in self.rules)), [])
