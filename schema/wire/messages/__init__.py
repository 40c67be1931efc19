"""JSON bodies of the REST API (`/v1/...`), one model per message and one module per concern, named like its routes.

Requests that change something carry a `request_id`: sent twice, the same request gets the same answer.
Replicas also carry their `incarnation`; the controller refuses an older one (`stale_incarnation`).
"""

from __future__ import annotations

from schema.wire.messages.base import (
    MOST_GAUGES,
    MOST_LEASES,
    MOST_METRICS,
    NAME,
    Count,
    ErrorCode,
    Message,
    Problem,
    Role,
    Seconds,
    Text,
)
from schema.wire.messages.job import TERMINAL_PHASES, JobStatus, LedgerStatus, Phase, ValidationRecord
from schema.wire.messages.leases import (
    HeldLease,
    LeasedGroup,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    ReleaseReply,
)
from schema.wire.messages.publications import (
    PublicationInfo,
    PublishReply,
    PublishRequest,
    ReplicaUpdate,
    Transport,
    UpdateReport,
    WeightsStatus,
)
from schema.wire.messages.recovery import (
    MAX_PUBLICATIONS,
    DeclaredLeases,
    DeclareLeases,
    DeclareReply,
    DeclareRequest,
    ReplayRequest,
)
from schema.wire.messages.replicas import (
    DrainReply,
    HeartbeatReply,
    HeartbeatRequest,
    RegisterReply,
    RegisterRequest,
    ReplicaInfo,
)
from schema.wire.messages.samples import PushItem, PushList, PushReply, PushResult
from schema.wire.messages.steps import (
    CheckpointReply,
    CheckpointRequest,
    CommitReply,
    CommitRequest,
    LedgerSnapshot,
    StepRecord,
)

__all__ = [
    "MAX_PUBLICATIONS",
    "MOST_GAUGES",
    "MOST_LEASES",
    "MOST_METRICS",
    "NAME",
    "TERMINAL_PHASES",
    "CheckpointReply",
    "CheckpointRequest",
    "CommitReply",
    "CommitRequest",
    "Count",
    "DeclareLeases",
    "DeclareReply",
    "DeclareRequest",
    "DeclaredLeases",
    "DrainReply",
    "ErrorCode",
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
    "Phase",
    "Problem",
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
    "ReplayRequest",
    "ReplicaInfo",
    "ReplicaUpdate",
    "Role",
    "Seconds",
    "StepRecord",
    "Text",
    "Transport",
    "UpdateReport",
    "ValidationRecord",
    "WeightsStatus",
]  # fmt: skip
