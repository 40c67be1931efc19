"""Messages about who trains a step: what policy replicas report while they do, and what they are to do next."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schema.wire.messages.base import Count, Message, MetricName, Text
from schema.wire.messages.steps import CommitReply
from schema.wire.weights import Publication

MOST_MEMBERS = 4096

MemberPoint = Literal["join", "healed", "begin", "ready", "holds", "broken", "saved"]


# fmt: off
class MemberRequest(Message):
    """Where a policy replica stands; see `controller.state.membership`."""

    incarnation: Count
    policy_epoch: Count = Field(
        description="Of its registration: it has to register again for what began in a later one.")
    at: MemberPoint = Field(
        description="join: it has the weights of `step` steps, and wants to take part. healed: it has loaded those "
        "that it was told to. begin: it has trained all steps before `step`. ready: it has computed its parts of a "
        "round. holds: it has the results of all parts. broken: it could not exchange them. saved: the checkpoint of "
        "`step` steps is written.")
    epoch: Count = Field(default=0, description="Membership epoch that it computes for.")
    step: Count
    number: Count = Field(default=0, description="Of the round in the step.")
    applied: Count = Field(default=0,
        description="Membership epoch of the exchange that it used last; 0: none since it loaded its weights.")
    leads: Count = Field(default=0, description="Membership epoch since which it leads; 0: it does not.")
    seconds: float = Field(default=0.0, ge=0, description="That each of its parts of the round took.")
    weights: Text = Field(default="", description="Checksum of its weights before the step.")
    batch: Text = Field(default="", description="Digest of the batch that it trains on.")
    kind: dict[MetricName, Text] = Field(default_factory=dict, max_length=16,
        description="What all members have in common, with join and begin.")
    wait_s: float = Field(default=0.0, ge=0, le=60, description="Long-poll: how long `wait` may take.")


class MemberReply(Message):
    """The next action of a policy replica."""

    action: Literal[
        "train", "wait", "commit", "save", "heal", "exchange", "apply", "again", "differs", "batch"
    ] = Field(
        description="As in `controller.state.membership.MemberOrder`; batch: ask for the batch again, it is another "
                    "one."
    )
    epoch: Count
    parts: list[Count] = Field(max_length=MOST_MEMBERS, description="Of the batch, that it computes.")
    members: list[Text] = Field(max_length=MOST_MEMBERS, description="Replica ids; the first one leads.")
    counts: list[Count] = Field(max_length=MOST_MEMBERS, description="How many parts each member has.")
    step: Annotated[int, Field(ge=-1, lt=2**53)] = Field(description="That a checkpoint is to be of, or a commit.")
    leads: bool = Field(description="Whether the caller commits, publishes and saves.")
    committed: CommitReply | None = Field(default=None, description="How far the job has come.")
    publication: Publication | None = Field(default=None, description="The newest one, where the caller leads.")


class MemberStatus(Message):
    """One of the policy replicas that train together."""

    replica_id: str
    parts: int = Field(description="Of each batch, that it computes.")
    seconds: float = Field(description="That a part takes it; 0: not known yet.")


class MembersStatus(Message):
    """Several policy replicas that train together."""

    epoch: int = Field(
        description="Membership epoch: rises whenever members or their parts change, by more than 1 after a restart "
        "of the controller.")
    parts: int = Field(description="Into which each batch is cut.")
    members: list[MemberStatus] = Field(description="The first one commits, publishes and saves.")
    waiting: list[Text] = Field(max_length=MOST_MEMBERS,
        description="Replica ids of those who take part from one of the next steps on.")
