"""The keys of the schema as a list, and what was declared of each.

Dotted names of leaves (keys that hold a value, not a table) and of sections. What a field says of its key holds
wherever its section stands, unless a section around it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from schema.config.availability import UNAVAILABLE, refused_by
from schema.config.key import Deviation, KeyFacts, facts_of
from schema.config.loading.explain import all_fields, annotation_of, section_classes
from schema.config.root import Config


@cache
def leaf_keys() -> tuple[str, ...]:
    """Every key that holds a value, in the order of the schema; a key of grpo and sft alike stands once."""
    return tuple(dict.fromkeys(".".join(path) for path in all_fields() if not is_section(path)))


@cache
def section_keys() -> tuple[str, ...]:
    """Every key that is a table of its own."""
    return tuple(dict.fromkeys(".".join(path) for path in all_fields() if is_section(path)))


def is_section(path: tuple[str, ...]) -> bool:
    """Whether a path names a table with keys of its own."""
    return any(True for _ in section_classes(annotation_of(path)))


def models_at(key: str) -> Iterator[type[BaseModel]]:
    """The section classes that can stand at a dotted key; "" is the root."""
    yield from section_classes(annotation_of(tuple(key.split("."))) if key else Config)


def fields_of(key: str) -> list[tuple[type[BaseModel], FieldInfo]]:
    """A key's field in each class that has it: one, or two where grpo and sft share a name."""
    section, _, name = key.rpartition(".")
    return [(model, model.model_fields[name]) for model in models_at(section) if name in model.model_fields]


@dataclass(frozen=True)
class Observable:
    """The effect of one key: the object that is observed (`key.Kind`), and a sentence."""

    kind: str
    sentence: str


def observable(key: str) -> Observable:
    """Return the observable effect of a key. Raises KeyError for anything but a key that holds a value."""
    if key not in leaf_keys():
        raise KeyError(key)
    if acts := _acts(key):
        kind, _, sentence = acts.partition(": ")
        return Observable(kind, sentence)
    row = refused_by(key)
    if row is None:
        raise KeyError(f"{key} says neither what it changes (acts) nor what it lacks (unbuilt)")
    where = "" if row == key else f"{row}: "
    return Observable("refusal", f"{where}this build cannot do {UNAVAILABLE[row].missing} yet.")


@cache
def acting_keys() -> frozenset[str]:
    """The keys that act in this build, with all of their values or some."""
    return frozenset(key for key in leaf_keys() if _acts(key))


@cache
def published_keys() -> frozenset[str]:
    """The keys whose names are of cosmos-rl's published schema, as are the sections around them."""
    return frozenset(key for key in leaf_keys() if all(_facts(part).published for part in _path(key)))


def deviation_of(key: str) -> Deviation | None:
    """Where a key's default is not cosmos-rl's."""
    return _facts(key).deviation


def example_value(key: str, info: FieldInfo) -> Any:
    """A value that the key takes, to show: declared where the default is unset, empty or a poor example."""
    declared, default = facts_of(info).example, info.get_default(call_default_factory=True)
    if declared is None and default is PydanticUndefined:
        return get_args(info.annotation)[0]
    return default if declared is None else declared


def _path(key: str) -> list[str]:
    """A key and the sections around it, the outermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _facts(key: str) -> KeyFacts:
    """Return the text of the first class that describes a key: grpo and sft share theirs."""
    declared = [facts_of(info) for _, info in fields_of(key)]
    return next((facts for facts in declared if facts != KeyFacts()), declared[0])


def _acts(key: str) -> str:
    *sections, own = _path(key)
    around = [_facts(section) for section in sections]
    if any(facts.unbuilt for facts in around):
        return ""
    return around[-1].inside.get(key.rpartition(".")[2], _facts(own).acts) if around else _facts(own).acts
