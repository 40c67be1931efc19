"""Values of validation rounds: the parameters of all, the groups of one, and one that ended and is not filed yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from schema.wire.sample import SampleHeader

PREFIX = "v"
"""First letter of the ids of validation groups and leases; those of training groups begin with "e"."""


@dataclass(frozen=True, slots=True)
class ValidationParams:
    """Parameters of validation."""

    n_rows: int
    """0: there is no validation, and nothing is ever due."""
    n_samples: int = 1
    """Samples of a row of a set that has no number of its own."""
    labels: Sequence[str] = ()
    """The set of each row; empty: there is one."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of a row by its set."""
    freq: int = 20
    before: bool = True
    max_replicas: int = 1
    lease_size: int | None = None
    lease_timeout: float = 120.0
    max_attempts: int = 5
    names: Mapping[str, str] = field(default_factory=dict)
    """Short ones of the rewards."""
    pass_score: float = 1.0
    pass_scores: Mapping[str, float] = field(default_factory=dict)
    """Least passing score by set."""
    keeps_texts: bool = False
    """Whether the texts of samples are in the store until their round is filed."""

    def label_of(self, position: int) -> str:
        """The set that a row is of; empty: there is one."""
        return self.labels[position] if self.labels else ""

    def samples_of(self, position: int) -> int:
        """Samples of one row."""
        return self.samples.get(self.label_of(position), self.n_samples)


@dataclass(slots=True)
class ValidationGroup:
    """One row in one round."""

    position: int
    state: Literal["waiting", "leased", "done"] = "waiting"
    attempt: int = 0
    failures: int = 0
    lease_id: str | None = None
    replica_id: str | None = None
    request_id: str | None = None
    expires: float = 0.0
    samples: dict[int, SampleHeader] = field(default_factory=dict)
    leases: dict[int, str] = field(default_factory=dict)
    """Which lease delivered each sample: a repeated push is answered even after the group is done."""
    missed: int = field(default=0, compare=False)
    """Heartbeats in a row of its holder that did not list its lease; not stored."""

    def to_record(self) -> dict[str, Any]:
        derived = ("samples", "leases", "missed")
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in derived}
        samples = {str(index): header.model_dump() for index, header in self.samples.items()}
        return {**fields, "samples": samples, "leases": {str(k): v for k, v in self.leases.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        fields = dict(record)
        samples = {int(k): SampleHeader.model_validate(v) for k, v in fields.pop("samples").items()}
        leases = {int(k): v for k, v in fields.pop("leases").items()}
        return cls(**fields, samples=samples, leases=leases)


@dataclass(frozen=True, slots=True)
class EndedRound:
    """A round that has ended, and whose texts are still in the store."""

    round_id: int
    version: int
