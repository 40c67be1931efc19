"""Values that go into the ledger and come out of it: parameters, decisions, changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from controller.ledger.group import Group
from controller.ledger.pass_orders import PassRule
from controller.ledger.reward_health import Failure
from schema.wire.messages import ErrorCode
from schema.wire.mixture import Exhausted, Mixture, Source


@dataclass(frozen=True, slots=True)
class LedgerParams:
    """The values of the config that the ledger depends on."""

    groups_per_step: int
    n_samples: int
    """Samples of a group that are trained, indices 0 … n − 1."""
    staleness_bound: int
    """S: the most steps by which a trained token may be older than the step."""
    n_positions: int
    data_passes: int = 1
    max_steps: int | None = None
    lease_timeout: float = 120.0
    max_attempts: int = 5
    oversample: float = 1.0
    on_reward_error: Literal["retry", "mask", "drop"] = "retry"
    on_stale: Literal["wait", "drop"] = "wait"
    straggler_timeout: float | None = None
    filter_metrics: tuple[str, ...] = ()
    max_refills: int = 0
    """Refills of a whole step that the filter may cost before the step is full; 0 or less: no limit."""
    keep_payloads: bool = False
    """Whether payloads may be needed again after their commit: only if a checkpoint can be returned to."""
    order: str = ""
    """Identifies the order in which rows are handed out."""
    data: str = ""
    """The hash of the prepared rows."""
    keep_recent: int = 512
    """How many trained groups, and how many dropped ones, are kept whole for people and late messages."""
    sources: tuple[Source, ...] = ()
    """Parts of the rows with shares of their own; empty: there are none."""
    exhausted: Exhausted = "repeat"
    """`stop`: the job ends where a source has gone through its rows as often as all were to be."""
    stages: tuple[int, ...] = ()
    """How many groups are kept when each stage of the shares begins."""
    by_results: PassRule | None = None
    """The rule by which later passes follow the results of earlier ones; None: they do not."""
    grown: tuple[int, ...] = ()
    """Numbers of rows that the job had before: the first ones, in the order that they were in."""
    unfinished: bool = False
    """Whether further rows are being prepared: they come before the second pass, and are enough for `max_steps`."""
    greedy: bool = False
    """Whether a group has one sample more, of index n: drawn greedily, the baseline of the others."""

    @property
    def group_size(self) -> int:
        return self.n_samples + self.greedy

    @property
    def baseline(self) -> int | None:
        """Index of the greedy sample, if groups have one."""
        return self.n_samples if self.greedy else None

    def mixture(self) -> Mixture:
        """Return the beginning of a job: nothing is drawn.

        While rows are being prepared it ends where a source has no more.
        """
        sources = self.sources or (Source("", self.n_positions),)
        stages = self.stages if self.sources else ()
        if self.unfinished:
            return Mixture.unfinished(sources, stages)
        return Mixture(sources, self.data_passes, self.exhausted, stages)

    @property
    def slots(self) -> int:
        """Groups per step that admission counts with."""
        return int(self.groups_per_step * self.oversample)

    def deadline(self, version: int) -> int:
        """The last step that may train tokens of a weight version."""
        return version + self.staleness_bound


@dataclass(frozen=True, slots=True)
class Stride:
    """Since when a step has had this many groups: the steps of a job are counted from there.

    step: committed steps then. groups: trained or dropped until then.
    """

    per_step: int
    step: int = 0
    groups: int = 0

    def of(self, per_step: int, step: int, groups: int) -> Stride:
        """The stride of a job that goes on from here with so many groups in a step."""
        return self if per_step == self.per_step else Stride(per_step, step, groups)

    def at_most(self, step: int, groups: int) -> Stride:
        """The stride of a job that goes back to a step, with so many groups trained or dropped."""
        return self if self.step <= step else Stride(self.per_step, step, groups)

    def steps(self, total: int) -> int:
        """The steps of a job of so many groups."""
        return self.step + -(-(total - self.groups) // self.per_step)


@dataclass(frozen=True, slots=True)
class LeaseRefusal:
    """Why a lease was not granted. `update`: a newer publication would change the answer."""

    reason: str
    update: bool = False


@dataclass(frozen=True, slots=True)
class LeaseDecision:
    groups: list[Group]
    refusal: LeaseRefusal | None = None


@dataclass(frozen=True, slots=True)
class PushOutcome:
    accepted: bool
    duplicate: bool = False
    code: ErrorCode | None = None
    detail: str = ""
    complete: bool = False
    """Whether it was the last sample of its group: an attempt has ended."""
    failure: Failure | None = None
    """Why no sample of that attempt has a score; None if one has."""


@dataclass(frozen=True, slots=True)
class LedgerChanges:
    """It holds what must be written in one transaction."""

    groups: list[Group]
    dropped_payloads: list[tuple[str, str]]
    """Group id and part (see `controller.ledger.group.SampleMeta`)."""
    header: dict[str, Any]
    removed: list[str] = field(default_factory=list)
    """Groups that are no longer kept whole, or no part of the ledger at all."""
    samples: list[Group] = field(default_factory=list)
    """Groups whose samples changed; the others' stored samples are as they were."""
    archive: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Rows of the archive that changed, by name: how each is rendered."""
    dropped: list[Group] = field(default_factory=list)
    """Groups that were dropped, for those who watch."""


@dataclass(slots=True)
class LedgerTotals:
    """Counters that only grow (within a timeline)."""

    staleness: Counter[int] = field(default_factory=Counter)
    duplicates: int = 0
    over_bound: int = 0
    trained_before: int = 0
    dropped_before: Counter[str] = field(default_factory=Counter)
