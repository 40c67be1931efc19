"""A group and the states it can be in: the values that the ledger moves about, and their stored form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from schema.wire.sample import SampleHeader


class State(StrEnum):
    """See the picture in `controller.ledger`."""

    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    BATCHED = "batched"
    TRAINED = "trained"
    DURABLE = "durable"
    DROPPED = "dropped"


OUTSTANDING = frozenset({State.LEASED, State.READY, State.BATCHED})


class DropReason(StrEnum):
    """Why a position of an epoch is not trained. Final."""

    ZERO_VARIANCE = "zero_variance"
    STALE = "stale"
    REWARD_ERROR = "reward_error"
    OVERLONG = "overlong"
    POISON = "poison"
    SURPLUS = "surplus"


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """What the ledger knows of one pushed sample."""

    header: SampleHeader
    n_bytes: int
    lease_id: str

    @property
    def usable(self) -> bool:
        """Whether it can be trained: it has a score and was not too long."""
        return self.header.score is not None and self.header.finish_reason != "overlong"

    def oldest_version(self, lease_version: int) -> int:
        """Oldest token version; a sample without generated tokens counts as of the version at the lease."""
        return self.header.oldest_version if self.header.oldest_version >= 0 else lease_version

    def to_record(self) -> dict[str, Any]:
        return {"h": self.header.model_dump(), "n": self.n_bytes, "l": self.lease_id}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        return cls(SampleHeader.model_validate(record["h"]), record["n"], record["l"])


def group_id(epoch: int, position: int) -> str:
    return f"e{epoch}-p{position}"


@dataclass(slots=True)
class Group:
    """One position of one epoch. Re-queued, it stays the same group with a higher `attempt`.

    `completed_lease` is the last lease under which all samples arrived: a repeated push under it is a duplicate,
    also when the group was dropped or its failed samples were discarded at that moment.
    """

    epoch: int
    position: int
    state: State = State.WAITING
    attempt: int = 0
    failures: int = 0
    lease_id: str | None = None
    completed_lease: str | None = None
    replica_id: str | None = None
    request_id: str | None = None
    lease_version: int = -1
    lease_step: int = 0
    expires: float = 0.0
    deadline: int = -1
    samples: dict[int, SampleMeta] = field(default_factory=dict)
    payload_kept: bool = True
    step: int | None = None
    reason: DropReason | None = None

    @property
    def id(self) -> str:
        return group_id(self.epoch, self.position)

    def oldest_version(self) -> int:
        """Oldest version that any token of this group may have."""
        return min(
            (meta.oldest_version(self.lease_version) for meta in self.samples.values()),
            default=self.lease_version,
        )

    def newest_version(self) -> int:
        return max((meta.header.newest_version for meta in self.samples.values()), default=-1)

    def to_record(self) -> dict[str, Any]:
        """Plain values for the store."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "state": self.state.value,
            "attempt": self.attempt,
            "failures": self.failures,
            "lease_id": self.lease_id,
            "completed_lease": self.completed_lease,
            "replica_id": self.replica_id,
            "request_id": self.request_id,
            "lease_version": self.lease_version,
            "lease_step": self.lease_step,
            "expires": self.expires,
            "deadline": self.deadline,
            "samples": {str(i): meta.to_record() for i, meta in self.samples.items()},
            "payload_kept": self.payload_kept,
            "step": self.step,
            "reason": None if self.reason is None else self.reason.value,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        fields = dict(record)
        fields["state"] = State(fields["state"])
        fields["reason"] = None if fields["reason"] is None else DropReason(fields["reason"])
        fields["samples"] = {int(i): SampleMeta.from_record(meta) for i, meta in fields["samples"].items()}
        return cls(**fields)
