"""Declarations of replicas to a controller whose store has lost history, so that all agree again. A trainer:

    POST /v1/replicas/{id}/declare   who I am, which steps I can replay, what I published     (`DeclareRequest`)
      ◀── from which step on the controller knows nothing, or that it needs a snapshot first
    POST /v1/steps/{t}/replay        step t as it was trained: its table and metrics          (`ReplayRequest`)

and a rollout replica, of leases that the controller says it does not hold:

    POST /v1/replicas/{id}/leases    what was granted for which weights, which samples it pushed (`DeclareLeases`)

Nothing here is done twice: a registration that is known is left as it is, a step that is committed is a duplicate.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from schema.wire.batch import StepTable
from schema.wire.messages.base import (
    MOST_LEASES,
    MOST_METRICS,
    MOST_VALIDATIONS,
    NAME,
    Count,
    Message,
    MetricName,
    RequestId,
    Text,
)
from schema.wire.messages.leases import HeldLease
from schema.wire.messages.steps import HeldOutLoss, LedgerSnapshot
from schema.wire.weights import Publication

MAX_PUBLICATIONS = 256
"""Publications that a declaration may carry: far more than a store keeps."""


class DeclareRequest(Message):
    """The registration that a trainer was given, and what it has done under it."""

    registration: RequestId = Field(description="Request id of the registration, which identifies it.")
    name: str = Field(min_length=1, max_length=128, pattern=NAME)
    incarnation: int = Field(ge=1, lt=2**53)
    policy_epoch: Count
    host: Text = ""
    pid: Count = 0
    world_size: int = Field(default=1, ge=1, le=65536)
    timeline: Count
    began: Count = Field(description="Step at which this timeline began.")
    since: Count | None = Field(
        default=None, description="The oldest timeline with the same steps before `began`; null: not known."
    )
    first: Count = Field(description="The oldest step that it can replay; `steps` when it remembers none.")
    steps: Count = Field(description="Steps contained in its weights now.")
    publications: list[Publication] = Field(
        default_factory=list, max_length=MAX_PUBLICATIONS, description="What it published, oldest first."
    )
    newest_publication: int = Field(
        default=0, ge=0, lt=2**53, description="The highest publication id that it ever heard of."
    )
    leads: Count = Field(
        default=0, description="Membership epoch since which it leads other policy replicas; 0: it does not."
    )
    snapshot: LedgerSnapshot | None = Field(
        default=None, description="Of its newest checkpoint, where the controller asked for one."
    )


class DeclareReply(Message):
    """`replay_from`: the steps from there to `DeclareRequest.steps` are to be replayed, in order."""

    replay_from: int
    needs_snapshot: bool = Field(
        default=False, description="The gap is longer than what can be replayed: declare again with one."
    )
    durable_steps: int = Field(description="Steps that a checkpoint covers, as far as the controller knows.")


class ReplayRequest(Message):
    """One step as it was trained."""

    replica_id: Text
    incarnation: Count
    policy_epoch: Count
    table: StepTable | None = Field(description="The batch; null in a supervised job.")
    metrics: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_METRICS)
    at: float = Field(ge=0, lt=2**53, description="Unix time at which it was trained.")
    validations: list[HeldOutLoss] = Field(default_factory=list, max_length=MOST_VALIDATIONS)


class DeclareLeases(Message):
    """Leases that a rollout replica works under."""

    incarnation: Count
    leases: Annotated[list[HeldLease], FailFast()] = Field(max_length=MOST_LEASES)


class DeclaredLeases(Message):
    lost_leases: list[str] = Field(description="Leases that it does not hold: drop that work.")
