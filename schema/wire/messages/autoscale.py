"""How many rollout replicas there should be, and why."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.util.text import PLAIN
from schema.wire.messages.base import Count, Message

MOST_REASON = 1000
Reason = Annotated[str, Field(max_length=MOST_REASON, pattern=PLAIN)]
Share = Annotated[float, Field(ge=0, le=1)]


# fmt: off
class Measures(Message):
    """Supply and demand over the newest steps. A replica that is starting is not counted."""

    seconds: float = Field(description="That the window covers.")
    wait: Share = Field(description="Share of its time that the trainer waited for samples.")
    throttled: Share = Field(description="Share of the groups that replicas could hold, which the bound refused.")
    demand: float = Field(description="Groups per second that the trainer takes while it works.")
    rate: float = Field(description="Ready groups per second of a replica.")
    need: float = Field(description="Replicas with which neither side would wait.")
    replicas: float = Field(description="Mean number of them.")
    capacity: float = Field(description="Groups that a replica holds when nothing holds it back.")
    lease_age_s: float = Field(description="Seconds of work on a group.")
    tokens_per_s: float = Field(description="Generated tokens per second of a replica, in groups that became ready.")


class AutoscaleStatus(Message):
    """`desired` is the value that a scaler of Kubernetes reads, with a target of 1."""

    enabled: bool = Field(description="`autoscale.enable`; without it the number is that of the start.")
    desired: int = Field(ge=0, description="Rollout replicas that there should be. 0 only when the job is over.")
    replicas: int = Field(ge=0, description="Those that are registered and neither lost nor gone.")
    working: int = Field(ge=0, description="Of these, those that lease.")
    minimum: int = Field(ge=0)
    maximum: int = Field(ge=0)
    manual: bool = Field(default=False, description="Whether a person has set the number.")
    final: bool = Field(default=False, description="Whether the job is over.")
    reason: Reason
    since: float = Field(description="Unix time since when the number is as it is.")
    start_s: float | None = Field(default=None, description="Typical seconds until a requested replica leases.")
    measures: Measures | None = Field(default=None, description="None before the first step was trained.")


class ScaleRequest(Message):
    replicas: Count | None = Field(description="This number until it is taken back; null takes it back.")
