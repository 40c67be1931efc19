"""Every call of the REST API as a value: what to send and how to read the answer.

`Client` and `AsyncClient` (in `controller.client.http`) send these, so each route is written once for both.
All calls are safe to repeat: requests carry ids, pushes name their lease and sample, commits their step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter

from schema.wire import messages as m
from schema.wire.frame import CONTENT_TYPE, pack_bundle
from schema.wire.messages.autoscale import AutoscaleStatus, ScaleRequest
from schema.wire.messages.members import MemberReply, MemberRequest
from schema.wire.messages.recovery import DeclaredLeases, DeclareLeases, DeclareReply, DeclareRequest, ReplayRequest
from schema.wire.messages.time_share import TurnReply, TurnRequest
from schema.wire.sample_file import Order
from schema.wire.weights import Publication

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of a successful (2xx) answer."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `wait_s` is how long the server may hold it open (long-poll)."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    read: Callable[[Answer], T]
    params: dict[str, str | int | float] | None = None
    body: bytes | None = None
    content_type: str = "application/json"
    headers: dict[str, str] | None = None
    wait_s: float = 0.0


def _model(kind: type[T]) -> Callable[[Answer], T]:
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    return lambda answer: adapter.validate_json(answer.body)


def _post(path: str, body: BaseModel | None, kind: type[T], wait_s: float = 0.0) -> Call[T]:
    data = b"" if body is None else body.model_dump_json().encode()
    return Call("POST", path, _model(kind), body=data, wait_s=wait_s)


def _nothing(_: Answer) -> None:
    return None


# ---- replicas ---------------------------------------------------------------------------------------------


def register(request: m.RegisterRequest) -> Call[m.RegisterReply]:
    return _post("/v1/replicas", request, m.RegisterReply)


def heartbeat(replica_id: str, request: m.HeartbeatRequest) -> Call[m.HeartbeatReply]:
    return _post(f"/v1/replicas/{replica_id}/heartbeat", request, m.HeartbeatReply)


def deregister(replica_id: str, incarnation: int, reason: str = "") -> Call[None]:
    """Leave: all leases of this replica are released at once."""
    params: dict[str, str | int | float] = {"incarnation": incarnation, "reason": reason}
    return Call("DELETE", f"/v1/replicas/{replica_id}", _nothing, params=params)


def drain(replica_id: str) -> Call[m.DrainReply]:
    return _post(f"/v1/replicas/{replica_id}/drain", None, m.DrainReply)


def profile(replica_id: str, request: m.ProfileRequest) -> Call[m.ProfileStatus]:
    """Ask a trainer for a profile."""
    return _post(f"/v1/replicas/{replica_id}/profile", request, m.ProfileStatus)


def member(replica_id: str, request: MemberRequest) -> Call[MemberReply]:
    """Say where a policy replica stands among others; what it is to do."""
    return _post(f"/v1/replicas/{replica_id}/member", request, MemberReply, wait_s=request.wait_s)


def turn(replica_id: str, request: TurnRequest) -> Call[TurnReply]:
    """Say what a replica holds of devices in common; whether they are its own."""
    return _post(f"/v1/replicas/{replica_id}/turn", request, TurnReply, wait_s=request.wait_s)


# ---- rollout ----------------------------------------------------------------------------------------------


def lease(request: m.LeaseRequest) -> Call[m.LeaseReply]:
    return _post("/v1/leases", request, m.LeaseReply, wait_s=request.wait_s)


def release(lease_id: str) -> Call[m.ReleaseReply]:
    return Call("DELETE", f"/v1/leases/{lease_id}", _model(m.ReleaseReply))


def push(group_id: str, lease_id: str, index: int, frame: bytes, replica_id: str) -> Call[m.PushReply]:
    """Push one sample frame."""
    headers = {"x-lease-id": lease_id, "x-replica-id": replica_id}
    path = f"/v1/groups/{group_id}/samples/{index}"
    return Call("POST", path, _model(m.PushReply), body=frame, content_type=CONTENT_TYPE, headers=headers)


def push_many(pushes: m.PushList, frames: Sequence[bytes]) -> Call[m.PushReply]:
    """Push several sample frames in one request; the answer has one result for each."""
    body = pack_bundle(frames, {"pushes": pushes.model_dump_json()})
    return Call("POST", "/v1/samples", _model(m.PushReply), body=body, content_type=CONTENT_TYPE)


def latest_publication(
    newer_than: int = 0, wait_s: float = 0.0, replica_id: str = "", incarnation: int = 0
) -> Call[Publication | None]:
    """The newest publication with an id above `newer_than`, or None when the wait is over.

    Its files, and all that it builds on, stay until the replica named asks again or is lost.
    """

    def read(answer: Answer) -> Publication | None:
        return None if answer.status == 204 else Publication.model_validate_json(answer.body)

    params: dict[str, str | int | float] = {"newer_than": newer_than, "wait_s": wait_s}
    if replica_id:
        params |= {"replica_id": replica_id, "incarnation": incarnation}
    return Call("GET", "/v1/publications/latest", read, params=params, wait_s=wait_s)


def report_update(publication_id: int, request: m.UpdateReport) -> Call[None]:
    """Report what came of a publication: applied, or unreadable."""
    path = f"/v1/publications/{publication_id}/reports"
    # An older controller refuses fields that it does not have; most reports leave them at their defaults.
    return Call("POST", path, _nothing, body=request.model_dump_json(exclude_defaults=True).encode())


# ---- policy -----------------------------------------------------------------------------------------------


def step_batch(
    step: int,
    policy_epoch: int,
    samples: Sequence[int] | Literal["all", "none"] = "all",
    wait_s: float = 0.0,
    *,
    prefetch: bool = False,
) -> Call[bytes | None]:
    """The batch of a step as `schema.wire.batch` bytes; None when the wait is over and it is not ready.

    `samples` are rows of the table; "none" answers with the table alone. prefetch: what it would be if the step
    before were committed now; None as soon as that is.
    """
    wanted = samples if isinstance(samples, str) else ",".join(map(str, samples))
    params: dict[str, str | int | float] = {"policy_epoch": policy_epoch, "samples": wanted, "wait_s": wait_s}
    if prefetch:
        params["ahead"] = True
    path = f"/v1/steps/{step}/batch"
    return Call("GET", path, lambda a: None if a.status == 204 else a.body, params=params, wait_s=wait_s)


def commit(step: int, request: m.CommitRequest) -> Call[m.CommitReply]:
    return _post(f"/v1/steps/{step}/commit", request, m.CommitReply)


def declare(replica_id: str, request: DeclareRequest) -> Call[DeclareReply]:
    """Declare what this trainer has done to a controller whose store lost history."""
    return _post(f"/v1/replicas/{replica_id}/declare", request, DeclareReply)


def declare_leases(replica_id: str, request: DeclareLeases) -> Call[DeclaredLeases]:
    """Ask for leases back that the controller does not know (any more)."""
    return _post(f"/v1/replicas/{replica_id}/leases", request, DeclaredLeases)


def recommit_step(step: int, request: ReplayRequest) -> Call[m.CommitReply]:
    return _post(f"/v1/steps/{step}/replay", request, m.CommitReply)


def publish(request: m.PublishRequest) -> Call[m.PublishReply]:
    return _post("/v1/publications", request, m.PublishReply)


def checkpoint(request: m.CheckpointRequest) -> Call[m.CheckpointReply]:
    return _post("/v1/checkpoints", request, m.CheckpointReply)


def ledger_snapshot(step: int) -> Call[m.LedgerSnapshot]:
    """Return what a checkpoint that covers `step` committed steps must store of the ledger."""
    return Call("GET", f"/v1/checkpoints/{step}/ledger", _model(m.LedgerSnapshot))


# ---- user -------------------------------------------------------------------------------------------------


def job() -> Call[m.JobStatus]:
    return Call("GET", "/v1/job", _model(m.JobStatus))


def operate(action: Literal["pause", "resume", "stop", "checkpoint"]) -> Call[m.JobStatus]:
    return _post(f"/v1/job/{action}", None, m.JobStatus)


def autoscale() -> Call[AutoscaleStatus]:
    return Call("GET", "/v1/autoscale", _model(AutoscaleStatus))


def scale(replicas: int | None) -> Call[AutoscaleStatus]:
    """Set the number of rollout replicas until it is taken back (None)."""
    return _post("/v1/autoscale", ScaleRequest(replicas=replicas), AutoscaleStatus)


def fail(reason: str) -> Call[m.JobStatus]:
    """End the job as failed (the launcher does so when a restart budget is used up)."""
    params: dict[str, str | int | float] = {"reason": reason}
    return Call("POST", "/v1/job/fail", _model(m.JobStatus), params=params)


def replica_exited(name: str, reason: str, *, crashed: bool = True, parent_pid: int = 0) -> Call[None]:
    """Report that the process of a replica has ended: its leases are released at once.

    `crashed`: by itself, which counts for what it held; a kill does not. `parent_pid`: the parent of that process, by
    which it differs from its successors; 0: the one that is registered.
    """
    params: dict[str, str | int | float] = {
        "reason": reason,
        "crashed": str(crashed).lower(),
        "parent_pid": parent_pid,
    }
    return Call("POST", f"/v1/replicas/by-name/{name}/exited", _nothing, params=params)


def steps(since: int = 0) -> Call[list[m.StepRecord]]:
    return Call("GET", "/v1/steps", _model(list[m.StepRecord]), params={"since": since})


def samples(
    kind: m.GroupKind | None, step: int | None, order: Order | None, limit: int
) -> Call[list[m.SampleRecord]]:
    """Samples that are kept as text."""
    wanted = {"kind": kind, "step": step, "order": order, "limit": limit}
    params: dict[str, str | int | float] = {name: value for name, value in wanted.items() if value is not None}
    return Call("GET", "/v1/samples", _model(list[m.SampleRecord]), params=params)


def validations() -> Call[list[m.ValidationRecord]]:
    return Call("GET", "/v1/validations", _model(list[m.ValidationRecord]))


def publications() -> Call[list[m.PublicationInfo]]:
    """The newest publications and what replicas have reported of them, oldest first."""
    return Call("GET", "/v1/publications", _model(list[m.PublicationInfo]))


def replicas(name: str = "") -> Call[list[m.ReplicaInfo]]:
    """All that ever registered, or the one of this name."""
    return Call("GET", "/v1/replicas", _model(list[m.ReplicaInfo]), params={"name": name} if name else None)


def ledger() -> Call[m.LedgerStatus]:
    return Call("GET", "/v1/ledger", _model(m.LedgerStatus))


def config() -> Call[dict[str, Any]]:
    return Call("GET", "/v1/config", _model(dict[str, Any]))


def ready() -> Call[None]:
    return Call("GET", "/readyz", _nothing)


# ---- meetings of ranks ------------------------------------------------------------------------------------


def announce(meeting_id: str, meeting: m.Meeting) -> Call[None]:
    """Say where rank 0 of a policy replica waits for its peers."""
    return Call("POST", f"/v1/replicas/meetings/{meeting_id}", _nothing, body=meeting.model_dump_json().encode())


def find_meeting(meeting_id: str, wait_s: float = 0.0) -> Call[m.Meeting | None]:
    """Where rank 0 waits; None when the wait is over and it has not come."""
    read = _model(m.Meeting)
    path, params = f"/v1/replicas/meetings/{meeting_id}", {"wait_s": wait_s}
    return Call("GET", path, lambda a: None if a.status == 204 else read(a), params=dict(params), wait_s=wait_s)
