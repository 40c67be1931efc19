"""Messages of every replica: registering, heartbeats, leaving."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from schema.util.text import Prose
from schema.wire.messages.base import (
    MOST_GAUGES,
    MOST_LEASES,
    NAME,
    Count,
    GroupKind,
    Message,
    MetricName,
    RequestId,
    Role,
    Text,
)
from schema.wire.messages.leases import HeldLease, RowsFile
from schema.wire.messages.steps import LedgerSnapshot
from schema.wire.weights import Publication


# fmt: off
class RegisterRequest(Message):
    request_id: RequestId
    role: Role
    name: str = Field(min_length=1, max_length=128, pattern=NAME,
        description="Stable over restarts of the same replica.")
    host: Text = ""
    pid: Count = 0
    parent_pid: Count = Field(default=0,
        description="Process that started this one: which incarnation its launcher reports as ended.")
    world_size: int = Field(default=1, ge=1, le=65536, description="Ranks of a policy replica; GPUs of an engine.")
    engine: Text = Field(default="", description="Inference engine of a rollout replica, with its version.")
    held_leases: Annotated[list[HeldLease], FailFast()] = Field(default_factory=list, max_length=MOST_LEASES,
        description="Leases a rollout replica still holds after losing the controller.")
    resume_step: int | None = Field(default=None, ge=0,
        description="Policy: committed steps contained in the weights it starts from (0: initial weights).")
    snapshot: LedgerSnapshot | None = Field(default=None,
        description="Policy: what the checkpoint it starts from holds of the ledger. Used where the controller knows "
        "fewer steps than the checkpoint has: an empty store, or a checkpoint of another run.")
    newest_publication: int = Field(default=0, ge=0, lt=2**53,
        description="The highest publication id that this replica ever heard of.")


class RegisterReply(Message):
    replica_id: str
    incarnation: int
    job_id: str
    config: dict[str, Any] = Field(description="The validated config, secrets left out, paths absolute.")
    job_seed: int
    mode: Literal["grpo", "sft"]
    timeline: int
    timeline_began: int = Field(default=0, description="Step at which this timeline began.")
    timeline_since: int | None = Field(default=None,
        description="The oldest timeline with the same steps before `timeline_began`.")
    committed_steps: int
    total_steps: int
    policy_epoch: int = Field(
        description="Membership epoch of the trainers; policy calls present it. It rises with every registration and "
        "contains the time, so that a store that lost history cannot lead to one being handed out twice.")
    heartbeat_interval: float
    heartbeat_timeout: float
    run_dir: str = Field(description="Directory of this run; exports and checkpoints go below it.")
    weight_store: str = Field(description="Root of the weight store: a directory, or `s3://bucket/prefix`.")
    data_file: str = Field(description="Prepared training data (see schema.wire.prompts); SFT reads it.")
    rows_files: dict[GroupKind, RowsFile] = Field(default_factory=dict,
        description="Prepared rows of each kind of group; empty: they come with each lease.")
    publication: Publication | None = Field(description="Newest published weights, if there are any yet.")
    members: int = Field(default=0, description="Policy replicas that train already, where there are several.")


MOST_PROFILED = 4096
"""Ranks of one profile."""
MOST_FILES = 8
"""Traces that are named; the others lie next to them."""
MOST_DETAIL = 2048
ProfileId = Annotated[str, Field(min_length=8, max_length=64, pattern=NAME)]
ProfileState = Literal["asked", "waiting", "recording", "writing", "written", "failed"]
UNDER_WAY: tuple[ProfileState, ...] = ("asked", "waiting", "recording", "writing")
Ranks = Annotated[list[Count], FailFast(), Field(max_length=MOST_PROFILED)]


class ProfileRequest(Message):
    request_id: ProfileId | None = Field(default=None,
        description="Sent twice, the same request gets the same answer; unset: a new one each time.")
    first_step: Count | None = Field(default=None,
        description="The first step to record; unset: the next one that the warm-up allows.")
    steps: int | None = Field(default=None, ge=1, le=10**6,
        description="Steps to record; unset: `profiler.sub_profiler_config.active_steps`.")
    warmup: int | None = Field(default=None, ge=0, le=10**6,
        description="Steps of warm-up before; unset: `profiler.sub_profiler_config.warmup_steps`.")
    ranks: Ranks = Field(default_factory=list,
        description="Ranks to record; empty: those of `profiler.sub_profiler_config.rank_filter`, else all.")


class ProfileOrder(Message):
    """A profile as the trainer gets it: nothing is left open but the step, which only it knows."""

    profile_id: ProfileId
    first_step: Count | None
    steps: Count
    warmup: Count
    ranks: Ranks


class ProfileStatus(ProfileOrder):
    state: ProfileState
    directory: Prose = Field(default="", max_length=4096, description="Of its files, on the trainer's machine.")
    files: Annotated[list[Text], FailFast()] = Field(default_factory=list, max_length=MOST_FILES,
        description="The first traces; there is one of each rank, once it is written.")
    detail: Prose = Field(default="", max_length=MOST_DETAIL, description="Why it has failed.")


class HeartbeatRequest(Message):
    incarnation: Count
    leases: Annotated[list[Text], FailFast()] = Field(default_factory=list, max_length=MOST_LEASES,
        description="Ids of all leases held: they are renewed.")
    version: int = Field(default=-1, ge=-1, lt=2**53, description="Weight version in use; -1 before the first one.")
    fetching: int = Field(default=0, ge=0, lt=2**53,
        description="Publication whose files it is reading now; 0: none.")
    sequence: int = Field(default_factory=lambda: time.monotonic_ns() // 1000,
        description="Rises from beat to beat; one that comes late, or twice, only says that the replica lives.")
    status: Text = Field(default="", description="What it is doing, for people.")
    gauges: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_GAUGES,
        description="Numbers for the display, e.g. idle_fraction, samples_per_s, tokens_per_s.")
    trouble: Prose = Field(default="", max_length=4096,
        description="What goes wrong next to its work, e.g. an upload; shown as last error.")
    profile: ProfileStatus | None = Field(default=None, description="How a trainer's newest profile stands.")


class HeartbeatReply(Message):
    commands: list[Literal["drain", "stop", "checkpoint", "anchor"]] = Field(default_factory=list,
        description="`anchor`, for a trainer: publish the newest version again, in full, since a replica can read "
        "nothing of what there is and no publication has followed.")
    lost_leases: list[str] = Field(default_factory=list,
        description="Leases it no longer holds: drop that work, a push is refused.")
    newest_publication: int = Field(default=0, description="Id of the newest publication; 0: none.")
    committed_steps: int = 0
    phase: str = ""
    profile: ProfileOrder | None = Field(default=None,
        description="A profile to take, for a trainer that has not reported it yet.")
    members_epoch: int = Field(default=0, description="Of several policy replicas: the present one.")


class DrainReply(Message):
    replica_id: str
    draining: bool


class ReplicaInfo(Message):
    replica_id: str
    role: Role
    name: str
    incarnation: int
    state: Literal["live", "draining", "lost", "left"]
    version: int
    leases: int
    work_s: float = Field(default=0.0, description="Seconds since each of its groups was leased to it, all together.")
    last_seen_s: float = Field(description="Seconds since its last sign of life.")
    host: str
    pid: int
    engine: str
    status: str
    gauges: dict[str, float]
    profile: ProfileStatus | None = Field(default=None, description="The newest profile of a trainer.")


class Meeting(Message):
    """Where the ranks of a policy replica meet: address of the store of rank 0, on its own machine."""

    address: Text
    port: int = Field(ge=1, le=65535)
    host: Text = Field(description="Name of that machine, for messages.")
