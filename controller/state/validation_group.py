"""The values of a validation round: what it depends on, its groups, and what a lease grants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from schema.wire.sample import SampleHeader


@dataclass(frozen=True, slots=True)
class ValidationParams:
    """What of the config validation depends on."""

    n_rows: int
    n_samples: int = 1
    freq: int = 20
    before: bool = True
    max_replicas: int = 1
    lease_size: int | None = None
    lease_timeout: float = 120.0
    max_attempts: int = 5


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

    def to_record(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("samples", "leases")}
        samples = {str(index): header.model_dump() for index, header in self.samples.items()}
        return {**fields, "samples": samples, "leases": {str(k): v for k, v in self.leases.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        fields = dict(record)
        samples = {int(k): SampleHeader.model_validate(v) for k, v in fields.pop("samples").items()}
        leases = {int(k): v for k, v in fields.pop("leases").items()}
        return cls(**fields, samples=samples, leases=leases)


@dataclass(frozen=True, slots=True)
class ValidationLease:
    """Groups granted to one request; none: validation has no work for this replica now."""

    round_id: int
    version: int
    groups: list[ValidationGroup]
