"""The keys of the schema as a list: dotted names of leaves (keys that hold a value, not a table) and sections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key; raises AttributeError where this job has no such key or no such table."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
