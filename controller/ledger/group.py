"""A group and the states it can be in: the values that the ledger moves about, and their stored form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Self

from schema.wire.sample import SampleHeader, header_text


class GroupState(StrEnum):
    """See the picture in `controller.ledger.ledger`."""

    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    BATCHED = "batched"
    TRAINED = "trained"
    DURABLE = "durable"
    DROPPED = "dropped"


OUTSTANDING = frozenset({GroupState.LEASED, GroupState.READY, GroupState.BATCHED})
DONE = frozenset({GroupState.TRAINED, GroupState.DURABLE})


class DropReason(StrEnum):
    """Why a position of an epoch is not trained. Final."""

    ZERO_VARIANCE = "zero_variance"
    STALE = "stale"
    REWARD_ERROR = "reward_error"
    OVERLONG = "overlong"
    POISON = "poison"
    SURPLUS = "surplus"


@dataclass(slots=True)
class SampleMeta:
    """The ledger keeps this of one pushed sample. It is never changed.

    The header stays the text that it came as, and is parsed on first access: a long queue is mostly this.

    Samples that arrive side by side are stored side by side, as one *part* of the group's payload: this one takes
    `n_bytes` from `offset` on, in the part that begins with the sample of index `first`. A lease accepts each index
    once, so (lease, first) is never used again.
    """

    index: int
    oldest: int
    """Oldest version among the generated tokens; -1 if there are none."""
    newest: int
    usable: bool
    """Whether its score counts: it has one and was not too long."""
    failed: bool
    """Whether its reward failed."""
    n_bytes: int
    lease_id: str
    first: int
    offset: int
    text: str
    baseline: bool = False
    """Whether it was drawn greedily, and is not trained."""

    @classmethod
    def of(
        cls,
        header: SampleHeader,
        n_bytes: int,
        lease_id: str,
        first: int | None = None,
        offset: int = 0,
        text: str | None = None,
    ) -> Self:
        """From a header, and the JSON text that says the same if it is at hand."""
        return cls(
            header.index,
            header.oldest_version,
            header.newest_version,
            header.score is not None and header.finish_reason != "overlong",
            header.error is not None,
            n_bytes,
            lease_id,
            header.index if first is None else first,
            offset,
            header_text(header) if text is None else text,
            header.baseline,
        )

    @property
    def header(self) -> SampleHeader:
        return SampleHeader.model_validate_json(self.text)

    @property
    def part(self) -> str:
        """Which part of the group's payload it belongs to."""
        return f"{self.lease_id}.{self.first}"

    def oldest_version(self, lease_version: int) -> int:
        """Oldest token version; a sample without generated tokens counts as of the version at the lease."""
        return self.oldest if self.oldest >= 0 else lease_version

    def to_row(self) -> tuple[Any, ...]:
        return _meta_row(self)


_meta_row: Callable[[SampleMeta], tuple[Any, ...]] = attrgetter(*SampleMeta.__slots__)


def group_id(epoch: int, position: int, source: int = 0) -> str:
    """`e<pass>-p<position>`, and `-s<source>` for all sources of a mixture but the first."""
    return f"e{epoch}-p{position}" + (f"-s{source}" if source else "")


def parse_group_id(name: str) -> tuple[int, int, int] | None:
    """Pass, position and source of a group, from its id; None for any other text."""
    match = _GROUP_ID.fullmatch(name)
    if match is None:
        return None
    parsed = int(match[1]), int(match[2]), int(match[3] or 0)
    return parsed if group_id(*parsed) == name else None


_GROUP_ID = re.compile(r"e([0-9]{1,18})-p([0-9]{1,18})(?:-s([0-9]{1,9}))?")


@dataclass(slots=True)
class Group:
    """One position of one pass through its source. Re-queued, it stays the same group with a higher `attempt`.

    `failures` counts attempts that ended in failed rewards, `crashes` holders that crashed with this group in hand.
    `completed_lease` is the last lease under which all samples arrived: a repeated push under it is a duplicate,
    also when the group was dropped or its failed samples were discarded at that moment. `error` is what went wrong
    with it last, if anything did: it stays with a group that is dropped.
    """

    epoch: int
    position: int
    state: GroupState = GroupState.WAITING
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
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
    error: str = ""
    source: int = 0
    """Which source of a mixture it is of."""
    leased_at: float = field(default=0.0, compare=False)
    """When its lease was granted, for people; not stored, so unknown (0) to a controller that starts again."""
    missed: int = field(default=0, compare=False)
    """Heartbeats in a row of its holder that did not list its lease; not stored."""
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = group_id(self.epoch, self.position, self.source)

    @property
    def place(self) -> tuple[int, int, int]:
        """Pass, position and source: the order in which groups wait and stand in a batch."""
        return self.epoch, self.position, self.source

    def oldest_version(self) -> int:
        """Oldest version that any token of this group may have."""
        return min(
            (meta.oldest_version(self.lease_version) for meta in self.samples.values()), default=self.lease_version
        )

    def newest_version(self) -> int:
        return max((meta.newest for meta in self.samples.values()), default=-1)

    def parts(self) -> set[str]:
        """All parts of its payload."""
        return {meta.part for meta in self.samples.values()}

    def to_record(self) -> dict[str, Any]:
        """Plain values for people, without the samples."""
        return dict(zip(FIELDS, self.to_row(), strict=True))

    def to_row(self) -> list[Any]:
        """Plain values for the store, in the order of FIELDS. The samples have a row of their own."""
        return list(_row(self))

    def samples_row(self) -> list[Any]:
        """The samples for the store, in the order in which they came."""
        return [meta.to_row() for meta in self.samples.values()]

    @classmethod
    def from_rows(cls, row: Sequence[Any], samples: Sequence[Any] = ()) -> Self:
        """Rebuild from what `to_row` and `samples_row` gave. Fields that are missing at the end have defaults."""
        group = cls(**dict(zip(FIELDS, row, strict=False)))
        group.state = GroupState(group.state)
        group.reason = None if group.reason is None else DropReason(group.reason)
        group.samples = {sample[0]: SampleMeta(*sample) for sample in samples}
        return group


FIELDS = (
    "epoch", "position", "state", "attempt", "failures", "crashes", "lease_id", "completed_lease", "replica_id",
    "request_id", "lease_version", "lease_step", "expires", "deadline", "payload_kept", "step", "reason",
    "error", "source",
)  # fmt: skip
"""Stored fields of a group in their order; new ones come last, so that older rows can be read."""
_row: Callable[[Group], tuple[Any, ...]] = attrgetter(*FIELDS)
