"""The view of a job that people and dashboards get."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from schema.wire.messages.base import Message
from schema.wire.messages.members import MembersStatus
from schema.wire.messages.publications import WeightsStatus
from schema.wire.messages.scores import SourceScores
from schema.wire.sample import Source


class Phase(StrEnum):
    STARTING = "starting"
    VALIDATING = "validating"
    TRAINING = "training"
    PAUSED = "paused"
    FINISHING = "finishing"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


TERMINAL_PHASES = frozenset({Phase.FINISHED, Phase.STOPPED, Phase.FAILED})


class ValidationRecord(Message):
    """One validation of one version. Generated answers have scores, conversations of supervised training a loss.

    Where supervised training generates as well, the record of a loss is completed by scores when its round has ended.
    """

    version: int
    at: float
    samples: int
    loss: float | None = Field(
        default=None, description="Supervised training: mean −log π over the tokens to learn; else null."
    )
    accuracy: float | None = Field(
        default=None, description="Supervised training: share of those tokens that are the likeliest."
    )
    score_mean: float | None = Field(
        default=None, description="Over the samples that have a score; null if none has."
    )
    score_error: float | None = Field(default=None, description="Standard error of that mean.")
    rewards_mean: dict[str, float] = Field(default_factory=dict)
    response_tokens_mean: float
    errors: int = 0
    scores: SourceScores | None = Field(
        default=None, description="Of generated answers: mean@n, pass@k, maj@n and intervals, as in an evaluation."
    )
    sources: dict[Source, SourceScores] = Field(
        default_factory=dict,
        description="The same of each validation set, by its `source`, and of each `data_source` of rows.",
    )

    @property
    def is_completed(self) -> bool:
        """Whether scores have come to a loss that was recorded before."""
        return self.loss is not None and self.scores is not None

    @property
    def value(self) -> float | None:
        """The number by which it is judged: the loss where there is one, else the mean score."""
        return self.score_mean if self.loss is None else self.loss

    @property
    def goodness(self) -> float | None:
        """The same number where more is better."""
        return self.score_mean if self.loss is None else -self.loss


class SourceStatus(Message):
    """One source of a mixture."""

    name: str
    rows: int = Field(description="Prepared rows.")
    share: float = Field(description="Of the groups that are trained, at this step.")
    drawn: int = Field(description="Groups handed out.")
    dropped: int = Field(description="Of these, dropped.")
    in_flight: int = Field(description="Of these, waiting, leased, ready or batched.")
    trained: int = Field(description="Of these, trained.")


class LedgerStatus(Message):
    created: int
    states: dict[str, int] = Field(description="Groups in each state; the values add up to `created`.")
    dropped: dict[str, int] = Field(description="Dropped groups by reason.")
    staleness: dict[int, int] = Field(description="Trained samples by staleness in steps.")
    max_staleness: int = Field(description="Largest staleness ever trained; never above the bound.")
    bound: int
    over_bound: int = Field(default=0, description="Samples refused at consumption by the safety net: 0.")
    duplicates: int = Field(default=0, description="Repeated pushes that were answered and not counted.")
    sources: list[SourceStatus] = Field(
        default_factory=list, description="The sources of a mixture; empty where none has a share of its own."
    )


class RewardStatus(Message):
    """How rewards do, over the whole run; by the newest heartbeats of live replicas: attempts, and what waits now."""

    scored: int = Field(description="Samples that have a score.")
    failed: dict[str, int] = Field(description="Samples without one, by kind of failure.")
    timeouts: int = Field(description="Of these, by time-outs and connection errors.")
    seconds_mean: float | None = Field(
        description="That a sample waits for its score, scoring included. Answers that were not scored do not count."
    )
    retried: int = Field(default=0, description="Attempts that failed and were followed by another.")
    attempt_seconds_mean: float | None = Field(
        default=None, description="That an attempt keeps a reward process busy: no waiting for a process."
    )
    scoring: int = Field(description="Samples that are being scored, or wait for it.")
    oldest_s: float = Field(description="Seconds that the oldest of them has waited.")
    wait_seconds: float = Field(description="That engines stood idle while samples were being scored.")
    wait_fraction: float | None = Field(description="The same as a share of the time since training began.")


class Alarm(Message):
    """A hint that training goes wrong."""

    name: str
    text: str


class JobStatus(Message):
    job_id: str
    name: str
    project: str = Field(default="", description="`logging.project_name`: what runs are grouped by.")
    mode: Literal["grpo", "sft"]
    phase: Phase
    step: int
    total_steps: int
    timeline: int
    version: int = Field(description="Newest published weight version; -1: none yet.")
    publication: int
    weights: WeightsStatus | None = None
    started_at: float
    first_step_at: float | None
    updated_at: float
    samples_per_s: float
    tokens_per_s: float
    eta_s: float | None
    reward: float | None = Field(description="Mean score of the last trained batch.")
    validation: ValidationRecord | None
    validating: tuple[int, int] | None = Field(
        default=None, description="Samples of the running validation that are scored, and all of them."
    )
    staleness_mean: float | None
    staleness_max: int
    queue_ready: int
    outstanding: int
    replicas: dict[str, int] = Field(description="Live replicas by role.")
    idle: dict[str, float] = Field(description="Fraction of time idle since training began, by role.")
    members: MembersStatus | None = Field(
        default=None, description="Several policy replicas that train together; null where there is one."
    )
    metrics: dict[str, float] = Field(description="Metrics of the last committed step.")
    last_error: str | None
    note: str = Field(
        default="", description="What holds the job up now, or why it finished short of its planned steps."
    )
    traceback: str = Field(default="", description="Of the user's code that failed the job.")
    sentence: str = Field(default="", description="What the job waits for or does, and on whom it depends.")
    sentence_since: float | None = Field(default=None, description="Unix time since when that is so.")
    rewards: RewardStatus | None = Field(default=None, description="Of a job of reinforcement learning.")
    alarms: list[Alarm] = Field(default_factory=list)
    advice: list[str] = Field(default_factory=list, description="What would make it faster.")
