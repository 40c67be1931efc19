"""The parts that this build lacks: the parts that fields name as `unbuilt`, and the check that refuses them.

    UNAVAILABLE[dotted key] = values that need nothing of the missing part, and the name of that part

A key of the table must have one of its neutral values; anything else is refused by name, never ignored. When
a part is built `unbuilt` leaves its fields, and nothing else changes. Defaults of the schema that are not neutral
(`tp_size = 2`, `compile = true`) are refused too, with the line to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from schema.config.key import facts_of
from schema.config.loading.explain import section_classes
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config


@dataclass(frozen=True)
class Unavailable:
    """One row.

    neutral: accepted values, the first is the one to recommend. missing: the part that is not built.
    only: the kind of job in which the key means anything; in the other its value is not looked at.
    section: of which nothing is built; what asks for it there is one refusal.
    """

    neutral: tuple[Any, ...]
    missing: str
    only: str = ""
    section: str = ""

    def concerns(self, config: Config) -> bool:
        """Whether the key means anything in this job."""
        return not self.only or (self.only == "grpo") == config.is_grpo


def _rows(
    models: Iterable[type[BaseModel]], above: str = "", only: str = "", whole: tuple[str, str] | None = None
) -> Iterator[tuple[str, Unavailable]]:
    """The rows of the keys in these sections; `whole`: the section around of which nothing is built, and its part."""
    for model in models:
        for name, info in model.model_fields.items():
            key, facts = f"{above}{name}", facts_of(info)
            default = info.get_default(call_default_factory=True)
            if isinstance(default, BaseModel):
                around = whole or ((key, facts.unbuilt) if facts.unbuilt else None)
                yield from _rows(section_classes(info.annotation), f"{key}.", facts.only or only, around)
            elif default is None and not (whole or facts.unbuilt) and any(section_classes(info.annotation)):
                inner = _rows(section_classes(info.annotation), f"{key}.", facts.only or only)
                yield from ((k, row) for k, row in inner if k.rpartition(".")[2] not in facts.inside)
            elif whole:
                yield key, Unavailable((default,), whole[1], section=whole[0])
            elif facts.unbuilt:
                neutral = facts.neutral or (default,)
                yield key, Unavailable(neutral, facts.unbuilt, facts.only or only)


UNAVAILABLE: dict[str, Unavailable] = dict(_rows([Config]))


def refused_by(key: str) -> str | None:
    """The row of `UNAVAILABLE` that covers a key: its own, or that of a table around it."""
    parts = key.split(".")
    rows = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((row for row in rows if row in UNAVAILABLE), None)


_NAMED = 3  # keys of an absent section that its refusal names


def check_available(config: Config) -> list[Problem]:
    """Every key that is refused, as it asks for a part which this build does not have.

    Several of one absent section are one refusal.
    """
    problems: list[Problem] = []
    absent: dict[str, list[Problem]] = {}
    for key, row in UNAVAILABLE.items():
        if config.is_evaluation and not key.startswith("evaluation."):
            continue  # nothing else is used
        section, name = _owner(config, key)
        if section is None or not row.concerns(config):
            continue
        value = getattr(section, name)
        if not any(_same(value, neutral) for neutral in row.neutral):
            default = type(section).model_fields[name].get_default(call_default_factory=True)
            refusal = _refusal(key, value, row, default, is_written=name in section.model_fields_set)
            (absent.setdefault(row.section, []) if row.section else problems).append(refusal)
    return problems + [_together(section, refusals) for section, refusals in absent.items()]


def _together(section: str, refusals: list[Problem]) -> Problem:
    """One refusal for all keys of a section of which nothing is built."""
    if len(refusals) == 1:
        return refusals[0]
    names = [problem.key.removeprefix(f"{section}.") for problem in refusals]
    names.sort(key=lambda name: name != "enable")
    suffix = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    missing = UNAVAILABLE[refusals[0].key].missing
    message = f"this build cannot do {missing} yet, which {', '.join(names[:_NAMED])}{suffix} ask for"
    related = tuple(problem.key for problem in refusals)
    return Problem(section, message, None, f"leave [{section}] out", related=related)


def _owner(config: Config, key: str) -> tuple[Any, str]:
    """The section that holds a key, and the key's name in it; None where this job has no such key."""
    *parents, name = key.split(".")
    section: Any = config
    for part in parents:
        section = getattr(section, part, None)
    return (section, name) if hasattr(section, name) else (None, name)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _refusal(key: str, value: Any, row: Unavailable, default: Any, is_written: bool) -> Problem:
    if is_written:
        shown = toml_value(value) if isinstance(value, bool | int | float | str) else "this"
    else:
        shown = f"the default, {toml_value(value)},"
    helps = is_written and any(_same(default, neutral) for neutral in row.neutral)
    hint = "leave it out" if helps else f"write {key} = {toml_value(row.neutral[0])}"
    return Problem(key, f"this build cannot do {row.missing} yet, which {shown} asks for", value, hint)
