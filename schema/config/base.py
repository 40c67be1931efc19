"""The base of every section: strict about types as TOML writes them, closed against unknown keys, immutable.

Invariant: a validated section holds exactly what the user wrote plus defaults. Nothing is rewritten; values
that follow from others are properties, so `model_fields_set` always tells what the user chose.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16", "float16"]
NonEmptyStr = Annotated[str, Field(min_length=1)]
UnitFloat = Annotated[float, Field(ge=0.0, le=1.0)]
RewardSpec = str | list[str] | dict[str, float]


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
    )


def reward_weights(spec: RewardSpec) -> dict[str, float]:
    """The three ways to write reward functions as one: name -> weight (1.0 where none is written)."""
    if isinstance(spec, str):
        return {spec: 1.0} if spec else {}
    if isinstance(spec, list):
        return {name: 1.0 for name in spec}
    return dict(spec)
