"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from schema.util.text import PLAIN, visible

# Bounds of what others send: far above anything of ours, far below what would hurt. Of long lists the first fault is
# told: a million of them would take seconds and a gigabyte.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$"
"""Names of replicas: they stand in addresses, logs and labels of metrics."""
MOST_LEASES, MOST_GAUGES, MOST_METRICS = 16_384, 64, 1024
MOST_STAGES, MOST_SECONDS = 32, 1e9
"""Timed stages of a publication or an update: encode, write; fetch, verify, prepare, pause, apply, …"""
Text = Annotated[str, Field(max_length=256, pattern=PLAIN)]
RequestId = Annotated[str, Field(min_length=8, max_length=64, pattern=PLAIN)]
Prose = Annotated[str, BeforeValidator(lambda text: visible(text) if isinstance(text, str) else text)]
"""What went wrong, for people, maybe in several lines: control characters become visible, with whoever sends it, so
that none is refused for the colours in an error text, and again with whoever receives it."""
MetricName = Annotated[str, Field(min_length=1, max_length=128, pattern=PLAIN)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Seconds = Annotated[
    dict[MetricName, Annotated[float, Field(ge=0, le=MOST_SECONDS)]],
    Field(max_length=MOST_STAGES, description="Seconds by stage."),
]

Role = Literal["rollout", "policy"]
GroupKind = Literal["train", "validation"]


class Message(BaseModel):
    """Base of all bodies: unknown fields are an error on both sides, NaN and infinity never travel."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
