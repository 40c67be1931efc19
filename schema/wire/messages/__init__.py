"""JSON bodies of the REST API (`/v1/...`), one model per message, grouped by who sends them.

Requests that change something carry a `request_id`: sent twice, the same request gets the same answer.
Replicas also carry their `incarnation`; the controller refuses an older one (`stale_incarnation`).
"""

from __future__ import annotations

from schema.wire.messages.base import (
    MOST_GAUGES,
    MOST_LEASES,
    MOST_METRICS,
    MOST_STAGES,
    NAME,
    Count,
    GroupKind,
    Message,
    MetricName,
    Prose,
    RequestId,
    Role,
    Seconds,
    Text,
)
from schema.wire.messages.errors import ErrorCode, Problem
from schema.wire.messages.policy import CheckpointReply, CheckpointRequest, CommitReply, CommitRequest
from schema.wire.messages.replicas import (
    DrainReply,
    HeartbeatReply,
    HeartbeatRequest,
    HeldLease,
    LedgerSnapshot,
    RegisterReply,
    RegisterRequest,
)
from schema.wire.messages.rollout import (
    LeasedGroup,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    PushItem,
    PushList,
    PushReply,
    PushResult,
    ReleaseReply,
)
from schema.wire.messages.user import (
    TERMINAL_PHASES,
    JobStatus,
    LedgerStatus,
    Phase,
    ReplicaInfo,
    StepRecord,
    ValidationRecord,
)
from schema.wire.messages.weights import (
    PublicationInfo,
    PublishReply,
    PublishRequest,
    ReplicaUpdate,
    Transport,
    UpdateMode,
    UpdateReport,
    WeightsStatus,
)

__all__ = [
    "MOST_GAUGES",
    "MOST_LEASES",
    "MOST_METRICS",
    "MOST_STAGES",
    "NAME",
    "TERMINAL_PHASES",
    "CheckpointReply",
    "CheckpointRequest",
    "CommitReply",
    "CommitRequest",
    "Count",
    "DrainReply",
    "ErrorCode",
    "GroupKind",
    "HeartbeatReply",
    "HeartbeatRequest",
    "HeldLease",
    "JobStatus",
    "LeaseReply",
    "LeaseRequest",
    "LeaseStatus",
    "LeasedGroup",
    "LedgerSnapshot",
    "LedgerStatus",
    "Message",
    "MetricName",
    "Phase",
    "Problem",
    "Prose",
    "PublicationInfo",
    "PublishReply",
    "PublishRequest",
    "PushItem",
    "PushList",
    "PushReply",
    "PushResult",
    "RegisterReply",
    "RegisterRequest",
    "ReleaseReply",
    "ReplicaInfo",
    "ReplicaUpdate",
    "RequestId",
    "Role",
    "Seconds",
    "StepRecord",
    "Text",
    "Transport",
    "UpdateMode",
    "UpdateReport",
    "ValidationRecord",
    "WeightsStatus",
]
