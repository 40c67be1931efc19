"""The base of all messages, and the reasons for which a request is refused."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from schema.util.text import PLAIN

# Bounds of what others send: far above anything of ours, far below what would hurt. Of long lists the first fault is
# reported: a million of them would take seconds and a gigabyte.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._:@-]*$"
"""Names of replicas: they stand in addresses, logs and labels of metrics."""
MOST_LEASES, MOST_GAUGES, MOST_METRICS = 16_384, 64, 1024
MOST_VALIDATIONS = 2  # of one commit: the version with its step, and version 0
MOST_STAGES, MOST_SECONDS = 32, 1e9
"""Timed stages of a publication or an update: encode, write; fetch, verify, prepare, pause, apply, …"""
Text = Annotated[str, Field(max_length=256, pattern=PLAIN)]
RequestId = Annotated[str, Field(min_length=8, max_length=64, pattern=PLAIN)]
MetricName = Annotated[str, Field(min_length=1, max_length=128, pattern=PLAIN)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Seconds = Annotated[
    dict[MetricName, Annotated[float, Field(ge=0, le=MOST_SECONDS)]],
    Field(max_length=MOST_STAGES, description="Seconds by stage."),
]

Role = Literal["rollout", "policy"]
GroupKind = Literal["train", "validation"]


class Message(BaseModel):
    """Base of all bodies: unknown fields are an error on both sides, NaN and infinity never travel."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TrainerRequest(Message):
    """The fields that each request of a trainer which changes something begins with."""

    request_id: RequestId
    replica_id: Text
    incarnation: Count
    policy_epoch: Count


class ErrorCode(StrEnum):
    """Stable codes of `application/problem+json` answers."""

    BAD_REQUEST = "bad_request"
    BAD_FRAME = "bad_frame"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_YOURS = "not_yours"
    NAME_TAKEN = "name_taken"
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
