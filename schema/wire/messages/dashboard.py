"""The dashboard's view of a run, alive or dead: bounded in size, however long the run is."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from schema.util.text import PLAIN
from schema.wire.messages.autoscale import Measures, Reason
from schema.wire.messages.base import Message, Text
from schema.wire.messages.job import LedgerStatus
from schema.wire.messages.replicas import ReplicaInfo


class ShownRun(Message):
    """A run that this address shows."""

    name: str
    base: str = Field(description="What the paths of its calls begin with.")
    live: bool = Field(description="Whether it can be followed and operated.")


class SessionReply(Message):
    runs: list[ShownRun]


class Overview(Message):
    """The front page. job: `JobStatus`; of a run that is dead as much of it as its directory holds."""

    event: int = Field(description="Id of the newest event: what comes later is in the stream of events.")
    job: dict[str, Any]
    ledger: LedgerStatus | None = None
    replicas: list[ReplicaInfo] = Field(default_factory=list)


class Curve(Message):
    """A metric by step; null: there is none, and the line has a gap."""

    steps: list[int]
    values: list[float | None]


class Curves(Message):
    """Curves by metric, thinned to the smallest and the largest value of each stretch: no peak is lost."""

    total: int = Field(description="Steps that the curves were made from.")
    names: list[str] = Field(description="All metrics that there are.")
    curves: dict[str, Curve]


class Span(Message):
    """A state of a replica, until the next one begins."""

    at: float
    state: str
    replica_id: str
    text: str


class Lane(Message):
    name: str
    role: str
    ranks: int = Field(description="Of a trainer: they start and end together.")
    spans: list[Span]


class Mark(Message):
    """Something that happened at a moment."""

    at: float
    kind: str
    text: str


class Fault(Message):
    """Failures of one kind: the newest of them."""

    kind: str
    count: int
    at: float
    text: str


class Timeline(Message):
    """The events of a run by time; of the oldest and of the many a part. Times are Unix seconds."""

    lanes: list[Lane]
    marks: list[Mark]
    publications: list[tuple[float, int]] = Field(description="Time and version.")
    steps: list[tuple[float, int]] = Field(description="Time of the commit, and step.")
    faults: list[Fault]
    began: float | None
    ended: float | None = Field(description="Time of the newest event.")
    now: float | None = Field(default=None, description="Time of the answer, of a job that is served.")


Note = Annotated[str, Field(max_length=8192, pattern=PLAIN)]


class ScaleDecision(Message):
    """Another number of rollout replicas, or another reason for the same one."""

    at: float
    before: int
    desired: int
    kind: Text = Field(description="Of the reason, the same while it stays the same; `manual`: a number by hand.")
    reason: Reason


class Scaling(Message):
    """How many rollout replicas were wanted, and were there.

    Lines are pairs of Unix time and the value from then on; of long ones the smallest, the largest and the last value
    of each stretch. Need, wait and throttled are measured at decisions.
    """

    enabled: bool
    note: Note = Field(description="Why the number does not follow the need; empty: it does.")
    minimum: int
    maximum: int
    desired: list[tuple[float, int]]
    replicas: list[tuple[float, int]] = Field(description="Those that were registered, neither lost nor gone.")
    need: list[tuple[float, float]] = Field(description="Replicas with which neither side would wait.")
    wait: list[tuple[float, float]] = Field(description="Share of its time that the trainer waited.")
    throttled: list[tuple[float, float]] = Field(description="Share of the groups that the bound refused.")
    measures: Measures | None = Field(default=None, description="At the newest decision that had any.")
    decisions: list[ScaleDecision] = Field(description="The newest, in order.")
    made: int = Field(description="How many there were in all.")
    began: float | None
    ended: float | None = Field(description="Time of the newest event.")
    now: float | None = Field(default=None, description="Time of the answer, of a job that is served.")


class LogFile(Message):
    name: str
    n_bytes: int
    at: float


class LogText(Message):
    """The end of a log. n_bytes: of the whole file."""

    name: str
    n_bytes: int
    text: str


class KeptSamples(Message):
    """The newest steps and validations whose samples are kept as text."""

    train: list[int]
    validation: list[int]
