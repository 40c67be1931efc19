"""The stream of events of a job: everything that people, dashboards and trackers show comes from it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from schema.util.text import PLAIN
from schema.wire.messages.base import Message, MetricName


class EventKind(StrEnum):
    """The kinds of events, and what the `data` of each holds."""

    STEP = "step"
    """A committed step: `StepRecord`, with `samples`, `tokens` and `timeline`."""
    VALIDATION = "validation"
    """A finished round: `ValidationRecord`."""
    PUBLICATION = "publication"
    """A published weight version: `id`, `version`, `kind`, `n_bytes`, `timeline`."""
    REPLICA = "replica"
    """A replica's new state: `name`, `replica_id`, `role`, `state`, `host`, `pid`, `ranks`, `why`."""
    MEMBERS = "members"
    """Other policy replicas train together, or have other parts: `epoch`, `step`, `parts`, `members` (parts of
    each)."""
    DROP = "drop"
    """Groups dropped for one reason: `reason`, `count`, `groups` (the first few), `error`."""
    REWARD = "reward"
    """The first failure of its kind: `failure`, `sample`, `error` (with the traceback)."""
    CHECKPOINT = "checkpoint"
    """A complete checkpoint: `step`, `path`."""
    REWIND = "rewind"
    """Back to an earlier checkpoint: `step`, `timeline`. Steps and validations beyond it are undone."""
    JOB = "job"
    """Another phase, or something that holds the job up: `phase`, `note`, `error`."""
    ALARM = "alarm"
    """A hint that training goes wrong, begun or over: `name`, `on`, `step`."""
    SCALE = "scale"
    """Another number of rollout replicas, or another reason for it: `desired`, `before`, `replicas`, `working`,
    `why` (the kind of reason), `reason`, `measures`."""
    ORDER = "order"
    """The order of a later pass was decided by results: `data_pass`, `source`, `rows`, and how many of them are left
    out as `solved` and `failed`."""
    CONTROLLER = "controller"
    """A controller took charge: `pid`, `host`, `committed_steps`, `timeline`."""


class Event(Message):
    """One event. Ids rise by time and are never used twice; gaps are possible."""

    id: int = Field(ge=1, lt=2**53)
    at: float = Field(description="Unix time.")
    kind: EventKind
    text: str = Field(max_length=1024, pattern=PLAIN, description="What happened, in one line for people.")
    data: dict[MetricName, Any] = Field(default_factory=dict, description="By kind; see `EventKind`.")
