"""The base of every section: strict about types as TOML writes them, closed against unknown keys, immutable.

Invariant: a validated section holds exactly what the user wrote plus defaults. Nothing is rewritten; values
that follow from others are properties, so `model_fields_set` always shows what the user chose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16", "float16"]
NonEmptyStr = Annotated[str, Field(min_length=1)]
CustomCode = Annotated[str, Field(pattern=r"^[^:]+\.py:[A-Za-z_]\w*$")]
"""The user's own code: `path/to/file.py:name`, relative to the current directory."""
UnitFloat = Annotated[float, Field(ge=0.0, le=1.0)]
Amount = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0)]
"""An integer is a number of things, a float a share. JSON schema has no place for a bound but in each branch."""
MAX_TIMEOUT = 1e8
"""Seconds, three years: clocks and sockets take no more than about a hundred times that."""
MOST_RANKS = 65_536
"""Replicas, or ranks of one: as many GPUs as the largest clusters have, and a plan of them takes half a second."""
MOST_SAMPLES = 1_048_576
"""Samples of one step, group or request: the controller and the trainer keep a row of each in memory."""
MOST_TOKENS = 2**31 - 1
"""Engines and attention kernels count positions in 32 bits."""
MOST_PROCESSES = 1024
"""Processes or threads on one machine: more than any has cores."""
MAX_TEMPERATURE = 100.0
"""Logits differ by tens: above it every token of the vocabulary is about as likely as any other."""
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[float, Field(gt=0.0, le=MAX_TIMEOUT)]
Delay = Annotated[float, Field(ge=0.0, le=MAX_TIMEOUT)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
BetaFloat = Annotated[float, Field(ge=0.0, lt=1.0)]
RewardSpec = str | list[str] | dict[str, float]


def _plain(value: Any) -> Any:
    """Refuse what JSON cannot carry: a free-form table travels to every worker as JSON."""
    if isinstance(value, dict):
        for item in value.values():
            _plain(item)
    elif isinstance(value, list):
        for item in value:
            _plain(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}: NaN and infinity cannot be passed on")
    elif not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"holds the {type(value).__name__} {value}: write it as a string")
    return value


FreeTable = Annotated[dict[str, Any], AfterValidator(_plain)]
"""A table whose keys belong to another system; values are what TOML and JSON have in common."""
FREE_TABLES = frozenset({"custom", "options", "extra", "engine_kwargs", "override_config"})
"""The names of these tables."""


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be -1 or at least 1, got 0")
    return value


SizeOrAll = Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)]
"""A count of at least 1, or -1 for all."""
RanksOrAll = Annotated[
    int, Field(ge=-1, le=MOST_RANKS, json_schema_extra={"not": {"const": 0}}), AfterValidator(_not_zero)
]
"""Ranks, or -1 for all that are left."""


class Section(BaseModel):
    """One table of the TOML file.

    An integer is accepted where a number is expected; a boolean is never a number, a string never anything
    else, and NaN and infinity are refused.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Validators are built at first use: one for the whole tree instead of one more at each import.
        defer_build=True,
    )


def reward_weights(spec: RewardSpec) -> dict[str, float]:
    """The three ways to write reward functions as one: name -> weight (1.0 where none is written)."""
    if isinstance(spec, str):
        return {spec: 1.0} if spec else {}
    if isinstance(spec, list):
        return dict.fromkeys(spec, 1.0)
    return dict(spec)


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Reward functions as metrics and people call them: `dir/file.py:function` is `function`.

    Where two would be called alike, they keep as much of their files' paths as tells them apart.
    """
    parts = {spec: _parts(spec) for spec in specs}
    short = {spec: names[-1] for spec, names in parts.items()}
    for depth in range(2, 1 + max(map(len, parts.values()), default=0)):
        counts = Counter(short.values())
        short |= {spec: ".".join(parts[spec][-depth:]) for spec, name in short.items() if counts[name] > 1}
    return short


def _parts(spec: str) -> list[str]:
    path, colon, function = spec.rpartition(":")
    return [part for part in path.removesuffix(".py").split("/") if part] + [function] if colon else [spec]
