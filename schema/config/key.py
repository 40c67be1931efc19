"""How a key is declared: one call at its field says everything that is known of it.

    seed: int | None = key(None, "Seed of the job.", ge=0, acts="request or reply: Order of the rows.", example=42)

`key` is pydantic's `Field` with what users and checks need besides: what the key changes, what this build lacks for
it, an example. `cosmos_key` is the same for names (and defaults) of cosmos-rl's published schema. `facts_of` reads
it again. Who uses a key is not said here: the probes of `tests/liveness` flip every key and watch its consumer.
Sections are laid out by hand (`# fmt: off`), so that a key takes two or three lines: name, type and default, then the
description, then the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal, NamedTuple, TypeVar, overload

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

T = TypeVar("T")
S = TypeVar("S", bound=BaseModel)

Kind = Literal[
    "sampling parameter", "engine argument", "process", "number", "request or reply", "file", "metric", "refusal"
]
"""The observed object: a field of a generation request; an argument of the inference engine; a process (how many,
its command line and environment); a tensor or number of the trainer; what the controller or a worker asks and
answers; what is written where; a reported value; or that the key is refused by name."""


class Deviation(NamedTuple):
    """Where our default is not cosmos-rl's: theirs, and why."""

    theirs: Any
    reason: str


@dataclass(frozen=True)
class KeyFacts:
    """Facts of a key besides type, bounds and description.

    acts: `kind: sentence`, what the key changes that one can see; empty for what is only refused.
    inside: of a section: `acts` of single keys in it, where this place differs.
    example: a value to show, where the default is unset, empty or a poor example.
    unbuilt: the part that this build lacks. For a section: all of it is unbuilt.
    neutral: values that need nothing of that part, the first to recommend; empty: the default.
    only: the kind of job in which the key means anything, where not in both.
    """

    acts: str = ""
    inside: Mapping[str, str] = field(default_factory=dict)
    example: Any = None
    unbuilt: str = ""
    neutral: tuple[Any, ...] = ()
    only: Literal["", "grpo", "sft"] = ""
    published: bool = False
    deviation: Deviation | None = None


@overload
def key(default: EllipsisType, description: str, **rest: Any) -> Any: ...
@overload
def key(default: type[S], description: str, **rest: Any) -> S: ...
@overload
def key(default: T, description: str, **rest: Any) -> T: ...
def key(default: Any, description: str, **rest: Any) -> Any:
    """Declare a key: its default (a section's class, or `...` for none) and what it is for.

    The rest are arguments of `KeyFacts` and of pydantic's `Field`.
    """
    facts = {name: rest.pop(name) for name in KeyFacts.__dataclass_fields__ if name in rest}
    start = {"default_factory": default} if isinstance(default, type) else {"default": default}
    info: FieldInfo = Field(description=description, **start, **rest)
    info.metadata.append(KeyFacts(**facts))
    return info


@overload
def cosmos_key(default: EllipsisType, description: str, **rest: Any) -> Any: ...
@overload
def cosmos_key(default: type[S], description: str, **rest: Any) -> S: ...
@overload
def cosmos_key(default: T, description: str, **rest: Any) -> T: ...
def cosmos_key(default: Any, description: str, **rest: Any) -> Any:
    """Declare a key of cosmos-rl's published schema; where its default is another here, `deviation` says why."""
    return key(default, description, published=True, **rest)


_PLAIN = KeyFacts()


def facts_of(info: FieldInfo) -> KeyFacts:
    """Return the facts that a field was declared with."""
    return next((item for item in info.metadata if isinstance(item, KeyFacts)), _PLAIN)
