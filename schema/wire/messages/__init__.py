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
    GroupKind,
    Message,
    Problem,
    Role,
    Seconds,
    Text,
)
from schema.wire.messages.events import Event, EventKind
from schema.wire.messages.job import (
    TERMINAL_PHASES,
    Alarm,
    JobStatus,
    LedgerStatus,
    Phase,
    RewardStatus,
    SourceStatus,
    ValidationRecord,
)
from schema.wire.messages.leases import (
    HeldLease,
    LeasedGroup,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    ReleaseReply,
    RowsFile,
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
    MOST_DETAIL,
    MOST_FILES,
    UNDER_WAY,
    DrainReply,
    HeartbeatReply,
    HeartbeatRequest,
    Meeting,
    ProfileOrder,
    ProfileRequest,
    ProfileState,
    ProfileStatus,
    RegisterReply,
    RegisterRequest,
    ReplicaInfo,
)
from schema.wire.messages.samples import (
    MOST_PIECES,
    MOST_TEXT,
    MOST_TRAINED,
    PushItem,
    PushList,
    PushReply,
    PushResult,
    SampleRecord,
    SampleText,
    TrainedSample,
)
from schema.wire.messages.scores import Estimate, SourceScores
from schema.wire.messages.steps import (
    CheckpointReply,
    CheckpointRequest,
    CommitReply,
    CommitRequest,
    HeldOutLoss,
    LedgerSnapshot,
    MixtureProgress,
    PassProgress,
    StepRecord,
    StoredPass,
)

__all__ = [
    "MAX_PUBLICATIONS", "MOST_DETAIL", "MOST_FILES", "MOST_GAUGES", "MOST_LEASES", "MOST_METRICS", "MOST_PIECES",
    "MOST_TEXT", "MOST_TRAINED", "NAME", "TERMINAL_PHASES", "UNDER_WAY", "Alarm", "CheckpointReply",
    "CheckpointRequest", "CommitReply", "CommitRequest", "Count", "DeclareLeases", "DeclareReply", "DeclareRequest",
    "DeclaredLeases", "DrainReply", "ErrorCode", "Estimate", "Event", "EventKind", "GroupKind", "HeartbeatReply",
    "HeartbeatRequest", "HeldLease", "HeldOutLoss", "JobStatus", "LeaseReply", "LeaseRequest", "LeaseStatus",
    "LeasedGroup", "LedgerSnapshot", "LedgerStatus", "Meeting", "Message", "MixtureProgress", "PassProgress",
    "Phase", "Problem", "ProfileOrder", "ProfileRequest", "ProfileState", "ProfileStatus", "PublicationInfo",
    "PublishReply", "PublishRequest", "PushItem", "PushList", "PushReply", "PushResult", "RegisterReply",
    "RegisterRequest", "ReleaseReply", "ReplayRequest", "ReplicaInfo", "ReplicaUpdate", "RewardStatus", "Role",
    "RowsFile", "SampleRecord", "SampleText", "Seconds", "SourceScores", "SourceStatus", "StepRecord", "StoredPass",
    "Text", "TrainedSample", "Transport", "UpdateReport", "ValidationRecord", "WeightsStatus",
]  # fmt: skip
