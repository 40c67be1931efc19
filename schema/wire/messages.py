"""JSON bodies of the REST API (`/v1/...`), one model per message, grouped by who sends them.

Requests that change something carry a `request_id`: sent twice, the same request gets the same answer.
Replicas also carry their `incarnation`; the controller refuses an older one (`stale_incarnation`).
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from schema.wire.weights import Offer, Publication, StoreKey

# Bounds of what others send: far above anything of ours, far below what would hurt. Of long lists the first fault is
# told: a million of them would take seconds and a gigabyte.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$"
"""Names of replicas: they stand in addresses, logs and labels of metrics."""
MOST_LEASES, MOST_GAUGES, MOST_METRICS = 16_384, 64, 1024
MOST_STAGES = 32
"""Timed stages of a publication or an update: encode, write; fetch, verify, prepare, pause, apply, …"""
Text = Annotated[str, Field(max_length=256)]
MetricName = Annotated[str, Field(min_length=1, max_length=128)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Seconds = Annotated[
    dict[MetricName, Annotated[float, Field(ge=0)]],
    Field(max_length=MOST_STAGES, description="Seconds by stage."),
]

Role = Literal["rollout", "policy"]
GroupKind = Literal["train", "validation"]


class Message(BaseModel):
    """Base of all bodies: unknown fields are an error on both sides, NaN and infinity never travel."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# ---- errors -----------------------------------------------------------------------------------------------


class ErrorCode(StrEnum):
    """Stable codes of `application/problem+json` answers."""

    BAD_REQUEST = "bad_request"
    BAD_FRAME = "bad_frame"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    LEASE_LOST = "lease_lost"
    FUTURE_VERSION = "future_version"
    STALE_INCARNATION = "stale_incarnation"
    UNKNOWN_REPLICA = "unknown_replica"
    STALE_EPOCH = "stale_epoch"
    WRONG_STEP = "wrong_step"
    CONFLICT = "conflict"
    JOB_FAILED = "job_failed"
    JOB_FINISHED = "job_finished"
    STORE_UNAVAILABLE = "store_unavailable"
    STANDBY = "standby"
    BUSY = "busy"
    TOO_SLOW = "too_slow"
    INTERNAL = "internal"


class Problem(Message):
    """Body of every error answer (RFC 9457), `code` is for programs and `detail` for people."""

    type: str = "about:blank"
    title: str
    status: int
    code: ErrorCode
    detail: str


# ---- replicas ---------------------------------------------------------------------------------------------


class LedgerSnapshot(Message):
    """What a checkpoint stores of the ledger: enough to resume with an empty Redis."""

    committed_steps: int = Field(ge=0, lt=2**53)
    timeline: int = Field(ge=0, lt=2**53)
    frontier: int = Field(
        ge=0, lt=2**53, description="Stream positions below it were handed out at least once."
    )
    untrained: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()] = Field(
        max_length=1_000_000, description="Stream positions below the frontier not trained and not dropped."
    )
    dropped: dict[str, Annotated[int, Field(ge=0, lt=2**53)]] = Field(
        default_factory=dict, max_length=64, description="Counts by reason."
    )
    n_positions: int | None = Field(
        default=None,
        ge=1,
        description="Rows of the prepared data: positions of other data mean other prompts.",
    )
    order: str | None = Field(
        default=None, max_length=64, description="Identifies the order in which the rows are handed out."
    )


class HeldLease(Message):
    """A lease that a rollout replica holds, and what it has done under it: the controller may have forgotten both."""

    group_id: str = Field(max_length=64)
    lease_id: str = Field(max_length=64)
    version: int = Field(
        default=-1, ge=-1, lt=2**53, description="Weight version that it was granted for; -1: not told."
    )
    publication_id: int = Field(default=0, ge=0, lt=2**53, description="Publication that it was granted for.")
    manifest_hash: str = Field(default="", max_length=128, description="Of that publication.")
    pushed: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()] = Field(
        default_factory=list,
        max_length=65536,
        description="Samples whose push was answered: it does not have them any more.",
    )


class RegisterRequest(Message):
    request_id: str = Field(min_length=8, max_length=64)
    role: Role
    name: str = Field(
        min_length=1, max_length=128, pattern=NAME, description="Stable over restarts of the same replica."
    )
    host: Text = ""
    pid: Count = 0
    world_size: int = Field(
        default=1, ge=1, le=65536, description="Ranks of a policy replica; GPUs of an engine."
    )
    engine: Text = Field(default="", description="Inference engine of a rollout replica, with its version.")
    held_leases: Annotated[list[HeldLease], FailFast()] = Field(
        default_factory=list,
        max_length=MOST_LEASES,
        description="Leases a rollout replica still holds after losing the controller.",
    )
    resume_step: int | None = Field(
        default=None,
        ge=0,
        description="Policy: committed steps contained in the weights it starts from (0: initial weights).",
    )
    snapshot: LedgerSnapshot | None = Field(
        default=None,
        description="Policy: what the checkpoint it starts from holds of the ledger. Used where the controller knows "
        "fewer steps than the checkpoint has: an empty store, or a checkpoint of another run.",
    )
    newest_publication: int = Field(
        default=0, ge=0, lt=2**53, description="The highest publication id that this replica ever heard of."
    )


class RegisterReply(Message):
    replica_id: str
    incarnation: int
    job_id: str
    config: dict[str, Any] = Field(description="The validated config, secrets left out, paths absolute.")
    job_seed: int
    mode: Literal["grpo", "sft"]
    timeline: int
    timeline_began: int = Field(default=0, description="Step at which this timeline began.")
    committed_steps: int
    total_steps: int
    policy_epoch: int = Field(
        description="Membership epoch of the trainers; policy calls present it. It rises with every registration and "
        "contains the time, so that a store that lost history cannot lead to one being handed out twice."
    )
    heartbeat_interval: float
    heartbeat_timeout: float
    run_dir: str = Field(description="Directory of this run; exports and checkpoints go below it.")
    weight_store: str = Field(description="Root of the weight store: a directory, or `s3://bucket/prefix`.")
    data_file: str = Field(description="Prepared training data (see schema.wire.prompts); SFT reads it.")
    publication: Publication | None = Field(description="Newest published weights, if there are any yet.")


class HeartbeatRequest(Message):
    incarnation: Count
    leases: Annotated[list[Text], FailFast()] = Field(
        default_factory=list, max_length=MOST_LEASES, description="Ids of all leases held: they are renewed."
    )
    version: int = Field(
        default=-1, ge=-1, lt=2**53, description="Weight version in use; -1 before the first one."
    )
    fetching: int = Field(
        default=0, ge=0, lt=2**53, description="Publication whose files it is reading now; 0: none."
    )
    sequence: int = Field(
        default_factory=lambda: time.monotonic_ns() // 1000,
        description="Rises from beat to beat; one that comes late, or twice, says nothing about leases any more.",
    )
    status: str = Field(default="", max_length=256, description="What it is doing, for people.")
    gauges: dict[MetricName, float] = Field(
        default_factory=dict,
        max_length=MOST_GAUGES,
        description="Numbers for the display, e.g. idle_fraction, samples_per_s, tokens_per_s.",
    )
    trouble: str = Field(
        default="",
        max_length=4096,
        description="What goes wrong beside its work, e.g. an upload; shown as last error.",
    )


class HeartbeatReply(Message):
    commands: list[Literal["drain", "stop", "checkpoint", "anchor"]] = Field(
        default_factory=list,
        description="`anchor`, for a trainer: publish the newest version again, in full, since a replica can read "
        "nothing of what there is and no publication has followed.",
    )
    lost_leases: list[str] = Field(
        default_factory=list, description="Leases it no longer holds: drop that work, a push is refused."
    )
    newest_publication: int = Field(default=0, description="Id of the newest publication; 0: none.")
    committed_steps: int = 0
    phase: str = ""


class DrainReply(Message):
    replica_id: str
    draining: bool


# ---- rollout ----------------------------------------------------------------------------------------------


class LeaseRequest(Message):
    request_id: str = Field(min_length=8, max_length=64)
    replica_id: Text
    incarnation: Count
    version: Count = Field(description="Weight version that the engine holds now.")
    publication_id: int = Field(ge=0, lt=2**53, description="Publication that the engine holds now.")
    manifest_hash: str = Field(
        default="",
        max_length=128,
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


# ---- policy -----------------------------------------------------------------------------------------------


class CommitRequest(Message):
    request_id: str = Field(min_length=8, max_length=64)
    replica_id: Text
    incarnation: Count
    policy_epoch: Count
    metrics: dict[MetricName, float] = Field(
        default_factory=dict, max_length=MOST_METRICS, description="Finite numbers of this step."
    )
    batch: str = Field(
        default="",
        max_length=64,
        description="`StepTable.digest` of the batch that was trained. A controller that has another one, or none, "
        "has lost history and refuses (`wrong_step`): the trainer declares itself.",
    )


class CommitReply(Message):
    committed_steps: int
    total_steps: int
    publish: bool = Field(description="Whether the version with this step is due for publication.")
    finished: bool = Field(description="No step follows: publish, export, deregister.")
    epochs: int = Field(default=0, description="Epochs of which every row was trained or dropped.")
    durable_steps: int = Field(
        default=0, description="Commits that are on disk for certain: the trainer need not remember them."
    )


class PublishRequest(Message):
    request_id: str = Field(min_length=8, max_length=64)
    replica_id: Text
    incarnation: Count
    policy_epoch: Count
    version: Count = Field(description="Committed steps contained in the weights.")
    uri: StoreKey
    manifest_hash: Text
    content_hash: Text
    n_bytes: Count
    kind: Literal["full", "delta"] = "full"
    begins: int | None = Field(
        default=None,
        ge=1,
        lt=2**53,
        description="Publication whose full version its chain begins with (`Publication.begins`); null: this one.",
    )
    full_bytes: Count = Field(default=0, description="Bytes of all its tensors, however it is stored.")
    changed: Count = Field(default=0, description="Elements that differ from the version before.")
    elements: Count = Field(default=0, description="Elements of all its tensors; 0: not told.")
    metrics: Seconds = Field(default_factory=dict)
    offer: Offer | None = None
    newest_publication: int = Field(
        default=0, ge=0, lt=2**53, description="The highest publication id that the trainer ever heard of."
    )


class PublishReply(Message):
    publication: Publication
    collectable: list[int] = Field(
        default_factory=list, description="Publications that nobody needs: their files may go."
    )
    anchor: bool = Field(
        default=False,
        description="Attach a full version to the next publication: a replica could not read what there is.",
    )


UpdateMode = Literal["in_place", "full"]
Transport = Literal["store", "collective"]


class UpdateReport(Message):
    """What came of a publication at one rollout replica."""

    replica_id: Text
    incarnation: Count
    status: Literal["applied", "unreadable"]
    transport: Transport = "store"
    mode: UpdateMode = Field(
        default="full", description="Whether changed elements were written in place, or all tensors loaded."
    )
    served_hash: str = Field(
        default="",
        max_length=256,
        description="Content hash computed from the weights being served; empty: not computed this time.",
    )
    n_bytes: Count = Field(default=0, description="Bytes that were fetched for it.")
    seconds: Seconds = Field(default_factory=dict)
    detail: str = Field(
        default="",
        max_length=4096,
        description="Why it is unreadable, or why the transport is not the one that was asked for.",
    )


class ReplicaUpdate(Message):
    """The newest report of a replica about a publication, for people."""

    replica_id: str
    at: float = Field(description="Unix time of the report.")
    status: Literal["applied", "unreadable"]
    transport: Transport
    mode: UpdateMode
    checked: bool | None = Field(
        description="Whether the served weights have the trainer's hash; null: not compared."
    )
    n_bytes: int
    seconds: dict[str, float]
    detail: str


class PublicationInfo(Message):
    """A publication as people see it."""

    publication: Publication
    at: float = Field(description="Unix time of its publication; 0: not known.")
    valid: bool = Field(description="Whether its weights are part of the run (a rewind takes them out).")
    files: Literal["kept", "listed", "collected"] = Field(
        description="`listed`: the trainer was told to remove its files; `collected`: it has been."
    )
    full_bytes: int
    ratio: float | None = Field(description="Bytes stored, of those of all tensors; null: not known.")
    density: float | None = Field(description="Elements changed, of all; null: not known.")
    seconds: dict[str, float] = Field(description="Of the trainer, by stage.")
    updates: list[ReplicaUpdate] = Field(description="What replicas have reported, newest last.")


class CheckpointRequest(Message):
    request_id: str = Field(min_length=8, max_length=64)
    replica_id: Text
    incarnation: Count
    policy_epoch: Count
    step: Count = Field(description="Committed steps that the checkpoint covers.")
    path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")


class CheckpointReply(Message):
    durable_steps: int
    scores: dict[int, float] = Field(
        default_factory=dict,
        description="Mean validation score by weight version: the best checkpoint stays.",
    )


# ---- user -------------------------------------------------------------------------------------------------


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


class ReplicaInfo(Message):
    replica_id: str
    role: Role
    name: str
    incarnation: int
    state: Literal["live", "draining", "lost", "left"]
    version: int
    leases: int
    last_seen_s: float = Field(description="Seconds since its last sign of life.")
    host: str
    pid: int
    engine: str
    status: str
    gauges: dict[str, float]


class StepRecord(Message):
    step: int
    at: float = Field(description="Unix time of the commit.")
    metrics: dict[str, float]


class ValidationRecord(Message):
    version: int
    at: float
    samples: int
    score_mean: float | None = Field(description="Over the samples that have a score; null if none has.")
    rewards_mean: dict[str, float]
    response_tokens_mean: float
    errors: int = 0


class LedgerStatus(Message):
    created: int
    states: dict[str, int] = Field(description="Groups in each state; the values add up to `created`.")
    dropped: dict[str, int] = Field(description="Dropped groups by reason.")
    staleness: dict[int, int] = Field(description="Trained samples by staleness in steps.")
    max_staleness: int = Field(description="Largest staleness ever trained; never above the bound.")
    bound: int
    over_bound: int = Field(default=0, description="Samples refused at consumption by the safety net: 0.")
    duplicates: int = Field(default=0, description="Repeated pushes that were answered and not counted.")


class WeightsStatus(Message):
    """The newest weights, in short; `GET /v1/publications` tells more."""

    version: int
    publication: int
    kind: Literal["full", "delta"]
    n_bytes: int
    ratio: float | None = Field(description="Bytes stored, of those of all tensors; null: not known.")
    density: float | None = Field(description="Elements changed, of all; null: not known.")
    updated: int = Field(description="Replicas that have reported it in use.")
    pause_s: float | None = Field(
        description="Longest pause of generation at the newest version that replicas have reported."
    )
    unreadable: int = Field(description="Reports of versions that could not be read, of this controller.")


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
    staleness_mean: float | None
    staleness_max: int
    queue_ready: int
    outstanding: int
    replicas: dict[str, int] = Field(description="Live replicas by role.")
    idle: dict[str, float] = Field(description="Fraction of time idle since training began, by role.")
    metrics: dict[str, float] = Field(description="Metrics of the last committed step.")
    last_error: str | None
