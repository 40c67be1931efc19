"""The registry of replicas: who is there, since when, and which incarnation of a name counts.

     register ─▶ live ─drain─▶ draining ─┐
                  ▲ │            │       ├─leave─▶ left
             beat │ └──silence──┐│       │
                  └──────────── lost ────┘

A replica has a name that is stable over its restarts. Each registration of a name starts a new *incarnation*
with an id of its own (`name.3`), and from then on only the newest incarnation is heard. A repeated registration
(same request id) gets the same incarnation. A lost replica that beats again is live again, without its leases; but
where a job has one trainer, one that was lost has left for good when another one comes.

A registration may carry a secret, of which the hash is kept. Then every later call of that replica must carry it
(`prove`), and while the replica is present no other process registers its name without it; with it, its
place is taken at once.

Pure: time comes in as `now`, and `take_changes` hands out the names whose records must be written.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from controller.errors import ApiError
from schema.wire.messages import (
    UNDER_WAY,
    ErrorCode,
    HeartbeatRequest,
    ProfileOrder,
    ProfileStatus,
    RegisterRequest,
    ReplicaInfo,
    Role,
)
from schema.wire.messages.recovery import DeclareRequest

ReplicaState = Literal["live", "draining", "lost", "left"]
PRESENT: tuple[ReplicaState, ...] = ("live", "draining")
MAX_ABSENT = 1000
"""Replicas that are remembered after they left or were lost: names of machines that come and go add up for months."""
_INCARNATION = re.compile("[1-9][0-9]{0,15}")
"""The number at the end of an id; `isdigit` would let in what `int` does not read."""
RISING = ("reward_wait_seconds", "leased_seconds", "reward_attempts", "reward_retried", "reward_seconds")
"""Gauges that count from the start of a process: nothing of them is lost when it ends."""
REMEMBERED_REQUESTS = 4
"""Request ids kept per name: enough to tell a late duplicate of an old registration from a new one."""


@dataclass(slots=True)
class Replica:
    """The newest incarnation of one name."""

    replica_id: str
    role: Role
    name: str
    incarnation: int
    request_ids: list[str]
    state: ReplicaState = "live"
    drain_asked: bool = False
    last_seen: float = 0.0
    sequence: int = -1
    """The number of its newest heartbeat."""
    version: int = -1
    publication_id: int = 0
    fetching: int = 0
    """Publication whose files it reads, as it says."""
    handed: list[int] = field(default_factory=list)
    """Publications handed out to it since it last asked: it may be about to read them."""
    host: str = ""
    pid: int = 0
    parent_pid: int = 0
    world_size: int = 1
    engine: str = ""
    status: str = ""
    gauges: dict[str, float] = field(default_factory=dict)
    inherited: dict[str, float] = field(default_factory=dict)
    """`RISING` gauges of those whose place it took, added up: with its own, of all that there ever were."""
    floor: int = 0
    """Highest incarnation of all names that had been forgotten when this one registered."""
    secret_hash: str = ""
    """The digest of the secret that it registered with; empty: with none, so anybody of its role may act for it."""
    profile: dict[str, Any] | None = None
    """A trainer's newest profile, as asked for or as last reported."""

    @property
    def present(self) -> bool:
        return self.state in PRESENT

    def knows(self, secret: str) -> bool:
        """Whether a caller with this secret is the one that registered."""
        return not self.secret_hash or hmac.compare_digest(self.secret_hash, _hash(secret))

    @property
    def profile_status(self) -> ProfileStatus | None:
        """Its newest profile."""
        return None if self.profile is None else ProfileStatus.model_validate(self.profile)

    @property
    def profile_order(self) -> ProfileOrder | None:
        """The profile that it has to hear of."""
        known = self.profile
        if known is None or known["state"] != "asked":
            return None
        return ProfileOrder.model_validate({name: known[name] for name in ProfileOrder.model_fields})

    @property
    def counted(self) -> dict[str, float]:
        """`RISING` gauges, with those that it inherited."""
        totals = {name: self.gauges.get(name, 0.0) + self.inherited.get(name, 0.0) for name in RISING}
        return {name: value for name, value in totals.items() if value}

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def publications(self) -> set[int]:
        """All that it holds, reads, or may be about to read."""
        return {self.publication_id, self.fetching, *self.handed} - {0}

    def info(self, leases: int, work_s: float, now: float) -> ReplicaInfo:
        return ReplicaInfo(
            replica_id=self.replica_id,
            role=self.role,
            name=self.name,
            incarnation=self.incarnation,
            state=self.state,
            version=self.version,
            leases=leases,
            work_s=work_s,
            last_seen_s=max(0.0, now - self.last_seen),
            host=self.host,
            pid=self.pid,
            engine=self.engine,
            status=self.status,
            gauges=self.gauges,
            profile=self.profile_status,
        )


@dataclass(frozen=True, slots=True)
class Registered:
    replica: Replica
    repeated: bool
    superseded: str | None
    """Id of the incarnation that this one replaces."""
    parent_pid: int = 0
    """The parent process of the incarnation that this one replaces."""


class Registry:
    """See the module's docstring."""

    def __init__(
        self,
        heartbeat_timeout: float,
        records: Iterable[Mapping[str, Any]] = (),
        *,
        trainers: int = 1,
        first: int = 0,
    ) -> None:
        """trainers: policy replicas of the job. Several register side by side; of one the next takes its place.
        first: lower bound of the incarnations that register from now on."""
        self._first = first
        self._timeout, self._several = heartbeat_timeout, trainers > 1
        self._by_name = {record["name"]: Replica(**record) for record in records}
        self._by_id = {replica.replica_id: replica for replica in self._by_name.values()}
        self._dirty: dict[str, Replica] = {}
        self._forgotten: list[str] = []
        self._floor = max((replica.floor for replica in self._by_name.values()), default=0)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._by_name.values())

    def present(self, role: Role) -> list[Replica]:
        return [replica for replica in self._by_name.values() if replica.role == role and replica.present]

    def total(self, name: str) -> float:
        """The sum of one of the `RISING` gauges over all replicas that there ever were."""
        return sum(replica.gauges.get(name, 0.0) + replica.inherited.get(name, 0.0) for replica in self)

    def by_name(self, name: str) -> Replica | None:
        return self._by_name.get(name)

    def register(self, request: RegisterRequest, now: float, secret: str = "") -> Registered:
        """Start a new incarnation of a name.

        Raises:
            ApiError: the name belongs to the other role, or to a replica that is present and has another secret;
                the request is a late duplicate of an older registration; or another trainer is present in a job
                that has one.
        """
        known = self._by_name.get(request.name)
        if known is not None:
            if known.role != request.role:
                raise ApiError(
                    ErrorCode.CONFLICT,
                    f"the name {request.name!r} belongs to a {known.role} replica: choose another name",
                )
            proven = known.knows(secret)
            if known.present and not proven:
                raise self._name_taken(known, now)
            if known.request_ids[-1] == request.request_id and known.state != "left" and proven:
                known.last_seen = now
                return Registered(known, repeated=True, superseded=None)
            if request.request_id in known.request_ids:
                raise ApiError(
                    ErrorCode.STALE_INCARNATION,
                    f"the registration of {request.name!r} has ended, or a newer one has taken its place",
                )
        if request.role == "policy" and not self._several:
            self._check_single_policy(request.name)
            self._take_the_place_of_others(request.name)
        before = known or self._forget()
        incarnation = max(1 + (self._floor if known is None else known.incarnation), self._first)
        requests = [] if known is None else known.request_ids
        replica = Replica(
            replica_id=id_of(request.name, incarnation),
            role=request.role,
            name=request.name,
            incarnation=incarnation,
            request_ids=[*requests, request.request_id][-REMEMBERED_REQUESTS:],
            last_seen=now,
            host=request.host,
            pid=request.pid,
            parent_pid=request.parent_pid,
            world_size=request.world_size,
            engine=request.engine,
            floor=self._floor,
            secret_hash=_hash(secret) if secret else "",
            inherited={} if before is None else before.counted,
        )
        superseded = None if known is None else known.replica_id
        if superseded is not None:
            del self._by_id[superseded]
        self._by_name[replica.name] = self._by_id[replica.replica_id] = replica
        self._dirty[replica.name] = replica
        parent = 0 if known is None else known.parent_pid
        return Registered(replica, repeated=False, superseded=superseded, parent_pid=parent)

    def _name_taken(self, known: Replica, now: float) -> ApiError:
        left = max(1, math.ceil(known.last_seen + self._timeout - now))
        return ApiError(
            ErrorCode.NAME_TAKEN,
            f"the name {known.name!r} is held by replica {known.replica_id} (host {known.host or 'unknown'}, "
            f"pid {known.pid}), which has another secret: it is free once that one has left or was silent for "
            f"{self._timeout:g} s, in {left} s at the earliest; who is started again with the same "
            "COSMOS_REPLICA_SECRET does not wait, and of two replicas under one name one needs another "
            "(COSMOS_REPLICA_NAME)",
            retry_after=left,
        )

    def _forget(self) -> Replica | None:
        """Drop the absent replica with the oldest heartbeat if there are too many; its id is never reused."""
        absent = [replica for replica in self._by_name.values() if not replica.present]
        if len(absent) < MAX_ABSENT:
            return None
        oldest = min(absent, key=lambda replica: replica.last_seen)
        del self._by_name[oldest.name], self._by_id[oldest.replica_id]
        self._dirty.pop(oldest.name, None)
        self._forgotten.append(oldest.name)
        self._floor = max(self._floor, oldest.incarnation)
        return oldest

    def restore(self, request: DeclareRequest, now: float) -> Replica:
        """Take a trainer's registration back that the store has forgotten, as it was.

        The caller has made sure that no later trainer is known (see `controller.ledger.reconcile`).

        Raises:
            ApiError: the name has registered again since, or belongs to a rollout replica.
        """
        known = self._by_name.get(request.name)
        if known is not None:
            if known.role != "policy":
                detail = f"the name {request.name!r} belongs to a {known.role} replica"
                raise ApiError(ErrorCode.CONFLICT, detail)
            same = request.registration == known.request_ids[-1]
            if known.incarnation > request.incarnation or (known.incarnation == request.incarnation and not same):
                detail = f"a newer registration of {request.name!r} has taken its place"
                raise ApiError(ErrorCode.STALE_INCARNATION, detail)
            if known.incarnation == request.incarnation:
                known.last_seen = now
                if not known.present:
                    self._set(known, "live")
                return known
            del self._by_id[known.replica_id]
        if not self._several:
            self._take_the_place_of_others(request.name)
        replica = Replica(
            replica_id=id_of(request.name, request.incarnation),
            role="policy",
            name=request.name,
            incarnation=request.incarnation,
            request_ids=[request.registration],
            last_seen=now,
            host=request.host,
            pid=request.pid,
            world_size=request.world_size,
            floor=self._floor,
        )
        self._by_name[replica.name] = self._by_id[replica.replica_id] = replica
        self._dirty[replica.name] = replica
        return replica

    def _take_the_place_of_others(self, name: str) -> None:
        """A trainer comes: one of another name that was lost, or forgotten, does not come to life again."""
        for other in self._by_name.values():
            if other.role == "policy" and other.name != name and other.state != "left":
                self.leave(other, "another trainer has taken its place")

    def _check_single_policy(self, name: str) -> None:
        others = [replica.name for replica in self.present("policy") if replica.name != name]
        if others:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"policy replica {others[0]!r} is present: another one can take over when it has left or missed "
                f"its heartbeats for {self._timeout:g} s",
            )

    def find(self, replica_id: str) -> Replica:
        """The replica with this id. Raises `ApiError` if it is unknown or superseded."""
        replica = self._by_id.get(replica_id)
        if replica is not None:
            return replica
        slug, _, number = replica_id.rpartition(".")
        incarnation = int(number) if _INCARNATION.fullmatch(number) else 2**64
        for other in self._by_name.values():
            if _slug(other.name) == slug and incarnation < other.incarnation:
                raise ApiError(
                    ErrorCode.STALE_INCARNATION,
                    f"replica {replica_id} was replaced by {other.replica_id}: this process must end",
                )
        raise ApiError(ErrorCode.UNKNOWN_REPLICA, f"replica {replica_id} is not registered: register first")

    def prove(self, replica_id: str, secret: str) -> Replica:
        """The replica with this id if `secret` is the one that it registered with. Raises `ApiError`."""
        replica = self.find(replica_id)
        if not replica.knows(secret):
            raise ApiError(
                ErrorCode.NOT_YOURS,
                f"this call does not carry the secret that {replica_id} registered with: no other process may act "
                f"for it",
            )
        return replica

    def check(self, replica_id: str, incarnation: int, role: Role | None = None) -> Replica:
        """The replica if it may act now. Raises `ApiError`."""
        replica = self.find(replica_id)
        if incarnation != replica.incarnation:
            detail = f"replica {replica_id} is at incarnation {replica.incarnation}, not {incarnation}"
            raise ApiError(ErrorCode.STALE_INCARNATION, detail)
        if replica.state == "left":
            detail = f"replica {replica_id} has left: register again"
            raise ApiError(ErrorCode.UNKNOWN_REPLICA, detail)
        if role is not None and replica.role != role:
            raise ApiError(ErrorCode.FORBIDDEN, f"replica {replica_id} is a {replica.role} replica")
        return replica

    def beat(self, replica: Replica, now: float, request: HeartbeatRequest) -> bool:
        """A sign of life of a checked replica; whether what it says is news: not if it comes late, or twice."""
        self.seen(replica, now)
        if request.sequence <= replica.sequence:
            return False
        replica.sequence = request.sequence
        replica.version, replica.fetching = request.version, request.fetching
        kept = {name: replica.gauges[name] for name in RISING if name in replica.gauges}
        replica.status, replica.gauges = request.status, kept | request.gauges
        self._profiled(replica, request.profile)
        return True

    def _profiled(self, replica: Replica, profile: ProfileStatus | None) -> None:
        """Store the newest profile that a trainer reports, unless an order that it has not received is pending."""
        if profile is None or replica.role != "policy":
            return
        order = replica.profile_order
        if order is None or order.profile_id == profile.profile_id:
            replica.profile = profile.model_dump()
            if order is not None:
                self._dirty[replica.name] = replica

    def ask_profile(self, replica: Replica, order: ProfileOrder) -> None:
        """It hears of it with its next heartbeat. Stored: a successor of this controller hands it on.

        Raises:
            ApiError: another profile is under way.
        """
        status = replica.profile_status
        if status is not None and status.state in UNDER_WAY:
            count = "1 step" if status.steps == 1 else f"{status.steps} steps"
            at = "the next step" if status.first_step is None else f"step {status.first_step}"
            raise ApiError(
                ErrorCode.CONFLICT,
                f"a profile of {replica.name} is under way ({status.state}; {count} from {at} on): ask "
                "again when it is written",
            )
        replica.profile = ProfileStatus(**order.model_dump(), state="asked").model_dump()
        self._dirty[replica.name] = replica

    def asks(self, replica: Replica) -> None:
        """It asks for a publication: it has read those that it was handed, or given them up."""
        if replica.handed:
            replica.handed = []
            self._dirty[replica.name] = replica

    def hand_out(self, replica: Replica, publication_id: int) -> None:
        """It is handed a publication. Stored: a successor of this controller must know that it may be read."""
        if publication_id not in replica.handed:
            replica.handed = [*replica.handed, publication_id]
            self._dirty[replica.name] = replica

    def seen(self, replica: Replica, now: float) -> None:
        """Any other call is a sign of life too."""
        replica.last_seen = now
        if replica.state == "lost":
            self._set(replica, "draining" if replica.drain_asked else "live")

    def drain(self, replica: Replica) -> None:
        replica.drain_asked = True
        self._set(replica, "draining" if replica.state == "live" else replica.state)

    def leave(self, replica: Replica, status: str = "") -> None:
        replica.status = status
        self._set(replica, "left")

    def gone(self, replica: Replica, status: str) -> None:
        """Its process is known to have ended."""
        if replica.state != "left":
            replica.status = status
            self._set(replica, "lost")

    def expire(self, now: float) -> list[Replica]:
        """Replicas that have just missed their heartbeats for too long."""
        late = [
            replica
            for replica in self._by_name.values()
            if replica.present and now - replica.last_seen > self._timeout
        ]
        for replica in late:
            self._set(replica, "lost")
        return late

    def forgive(self, now: float) -> None:
        """After a downtime of the controller: no replica could beat, so none is late."""
        for replica in self._by_name.values():
            replica.last_seen = now

    def take_forgotten(self) -> list[str]:
        """Names whose records go."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def take_changes(self) -> list[Replica]:
        changed, self._dirty = list(self._dirty.values()), {}
        return changed

    def _set(self, replica: Replica, state: ReplicaState) -> None:
        replica.state = state
        self._dirty[replica.name] = replica


def id_of(name: str, incarnation: int) -> str:
    """The id of an incarnation of a name."""
    return f"{_slug(name)}.{incarnation}"


def _hash(secret: str) -> str:
    """All that is kept of a secret: it cannot be guessed, so its hash needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _slug(name: str) -> str:
    """A name as part of a path; different names have different slugs."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return plain if plain == name else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
