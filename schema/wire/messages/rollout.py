"""Messages of rollout replicas: leases of prompt groups, pushed samples."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import FailFast, Field

from schema.util.text import PLAIN
from schema.wire.messages.base import Count, GroupKind, Message, RequestId, Text
from schema.wire.messages.errors import ErrorCode


class LeaseRequest(Message):
    request_id: RequestId
    replica_id: Text
    incarnation: Count
    version: Count = Field(description="Weight version that the engine holds now.")
    publication_id: int = Field(ge=0, lt=2**53, description="Publication that the engine holds now.")
    manifest_hash: str = Field(
        default="",
        max_length=128,
        pattern=PLAIN,
        description="Of that publication: after a loss of history its id may be another's.",
    )
    max_groups: int = Field(ge=1, le=4096)
    wait_s: float = Field(
        default=0.0, ge=0, le=60, description="Long-poll: how long an empty answer may wait."
    )


class LeasedGroup(Message):
    group_id: str
    lease_id: str
    kind: GroupKind
    epoch: int
    position: int
    attempt: int = Field(description="1 for the first lease of this position.")
    prompt_token_ids: list[int]
    row: dict[str, Any] = Field(description="The dataset row for rewards: prompt, reference answer, extras.")
    seeds: list[int] = Field(description="Sampling seed of each sample; its length is the group's size.")
    done: list[int] = Field(default_factory=list, description="Sample indices that were pushed already.")
    deadline: int = Field(description="Last step that may train this group at the version it was leased at.")
    pinned_version: int | None = Field(
        default=None, description="Validation: every sample must come from exactly this weight version."
    )


class LeaseStatus(StrEnum):
    GRANTED = "granted"
    THROTTLED = "throttled"
    UPDATE = "update"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"


class LeaseReply(Message):
    status: LeaseStatus
    groups: list[LeasedGroup] = Field(default_factory=list)
    expires_in_s: float = 0.0
    reason: str = Field(default="", description="Why nothing was granted, and what would change it.")
    update_to: int | None = Field(default=None, description="Publication id that must be loaded first.")


class PushItem(Message):
    """One entry of a bundle of samples (metadata key "pushes"), same order as the frames."""

    group_id: Text
    lease_id: Text
    index: Count


class PushList(Message):
    replica_id: Text
    pushes: Annotated[list[PushItem], FailFast()] = Field(min_length=1, max_length=4096)


class PushResult(Message):
    group_id: str
    index: int
    accepted: bool = Field(description="Also true for a repeated push of what is stored already.")
    duplicate: bool = False
    code: ErrorCode | None = None
    detail: str = ""


class PushReply(Message):
    results: list[PushResult]


class ReleaseReply(Message):
    released: bool
