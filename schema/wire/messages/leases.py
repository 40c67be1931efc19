"""Leases of prompt groups: what rollout replicas ask for, hold and give back."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import FailFast, Field

from schema.util.text import PLAIN
from schema.wire.messages.base import Count, GroupKind, Message, RequestId, Text


# fmt: off
class LeaseRequest(Message):
    request_id: RequestId
    replica_id: Text
    incarnation: Count
    version: Count = Field(description="Weight version that the engine holds now.")
    publication_id: int = Field(ge=0, lt=2**53, description="Publication that the engine holds now.")
    manifest_hash: str = Field(default="", max_length=128, pattern=PLAIN,
        description="Of that publication: after a loss of history its id may be another's.")
    max_groups: int = Field(ge=1, le=4096)
    wait_s: float = Field(default=0.0, ge=0, le=60, description="Long-poll: how long an empty answer may wait.")
    reads: list[Annotated[str, Field(max_length=64, pattern=PLAIN)]] = Field(default_factory=list, max_length=2,
        description="Digests of the files of prepared rows that the replica reads itself.")


class LeasedGroup(Message):
    group_id: str
    lease_id: str
    kind: GroupKind
    epoch: int
    position: int
    attempt: int = Field(description="1 for the first lease of this position.")
    row_index: int | None = Field(default=None,
        description="Row of the prepared file that the replica reads; prompt_token_ids and row are empty then.")
    prompt_token_ids: list[int]
    row: dict[str, Any] = Field(description="The dataset row for rewards: prompt, reference answer, extras.")
    seeds: list[int] = Field(description="Sampling seed of each sample; its length is the group's size.")
    greedy: int | None = Field(default=None,
        description="Index of the sample that is drawn greedily and only scored: the baseline of the others.")
    done: list[int] = Field(default_factory=list, description="Sample indices that were pushed already.")
    deadline: int = Field(description="Last step that may train this group at the version it was leased at.")
    pinned_version: int | None = Field(default=None,
        description="Validation: every sample must come from exactly this weight version.")
    part: str = Field(default="", description="Validation: the set that it is of, where there are several.")

    @property
    def purpose(self) -> str:
        """Name what it is drawn and scored for; see `purpose_of`."""
        return purpose_of(self.kind, self.part)


def purpose_of(kind: GroupKind, part: str = "") -> str:
    """Name groups that are drawn and scored alike: `train`, `validation`, or `validation/` and a set's label."""
    return f"{kind}/{part}" if part else kind


class LeaseStatus(StrEnum):
    GRANTED = "granted"
    THROTTLED = "throttled"
    UPDATE = "update"
    PAUSED = "paused"
    DRAINING = "draining"
    FINISHED = "finished"


class RowsFile(Message):
    """Prepared rows that a rollout replica may read itself, where it has the same file."""

    path: str
    digest: str = Field(description="Hash of its data (`schema.wire.prompts.data_digest`).")


class LeaseReply(Message):
    status: LeaseStatus
    groups: list[LeasedGroup] = Field(default_factory=list)
    expires_in_s: float = 0.0
    reason: str = Field(default="", description="Why nothing was granted, and what would change it.")
    update_to: int | None = Field(default=None, description="Publication id that must be loaded first.")
    rows_files: dict[GroupKind, RowsFile] = Field(default_factory=dict,
        description="Prepared rows that are there since the replica registered: from here on it may read these.")


class ReleaseReply(Message):
    released: bool


class HeldLease(Message):
    """A lease that a rollout replica holds, and what it has done under it: the controller may have forgotten both."""

    group_id: str = Field(max_length=64, pattern=PLAIN)
    lease_id: str = Field(max_length=64, pattern=PLAIN)
    version: int = Field(default=-1, ge=-1, lt=2**53,
        description="Weight version that it was granted for; -1: not known.")
    publication_id: int = Field(default=0, ge=0, lt=2**53, description="Publication that it was granted for.")
    manifest_hash: str = Field(default="", max_length=128, pattern=PLAIN, description="Of that publication.")
    pushed: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()] = Field(default_factory=list, max_length=65536,
        description="Samples whose push was answered: it does not have them any more.")
