"""Why a request is refused."""

from __future__ import annotations

from enum import StrEnum

from schema.wire.messages.base import Message


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
