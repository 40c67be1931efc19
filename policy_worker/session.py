"""The session of a policy replica with the controller: one registration, its calls, its heartbeats.

    register ──▶ reply: config, mode, committed steps
      ├─ call(…)             training's own calls, in the main thread
      └─ heartbeat thread    gauges and profile out; commands in ─▶ shutdown, and profiles to take

Rank 0 has the session, the other ranks only a `Caller`. A lost controller is waited for up to
`controller.controller_lost_timeout`, in slices short enough that a request to leave is noticed; then
`ControllerLost` is raised.

A controller that came back with a store that lost history refuses what it does not know of, or shows in a heartbeat
that it knows less than it did. Then the trainer declares itself, replays the steps that are missing (`RejoinLog`),
and continues as if nothing had happened; if the controller knows a later trainer instead, this one ends. One of
several policy replicas that does not take part yet has nothing to declare: it registers anew.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from controller.client import Call, Client, ControllerError, ControllerLost, Refused
from controller.client import calls as api
from policy_worker.errors import LeftBehindError, NoCheckpointError, PolicyError, ReplacedError
from policy_worker.process import Environment, ShutdownRequest
from policy_worker.rejoin_log import RejoinLog
from schema.config import Config
from schema.wire import messages as m
from schema.wire.messages.recovery import DeclareRequest, ReplayRequest
from schema.wire.weights import Publication

T = TypeVar("T")
log = logging.getLogger(__name__)

START_PATIENCE = 60.0
"""Seconds to find the controller at first: it may be starting at the same time."""
SLICE = 3.0
"""Seconds of one round of retries: so often a request to leave is looked at."""
_GONE = (m.ErrorCode.STALE_INCARNATION, m.ErrorCode.UNKNOWN_REPLICA)
_BEHIND = (
    m.ErrorCode.UNKNOWN_REPLICA, m.ErrorCode.STALE_EPOCH, m.ErrorCode.WRONG_STEP, m.ErrorCode.FUTURE_VERSION,
)  # fmt: skip
"""Answers of a controller that has lost history, among others."""
MENDS = 3
"""Times that one call may lead to a declaration: a second loss in between is possible, a third is something else."""
LEADER_SECONDS = 60.0
"""How long a rank waits for rank 0 to declare the replica: a few heartbeats."""


class LeaveRequestedError(PolicyError):
    """A request to leave came while the controller was out of reach."""

    exit_code = 0


TROUBLE = 2048
"""Characters of a trouble that a heartbeat carries."""


def request_id() -> str:
    """A new id: the same request sent twice gets the same answer."""
    return uuid.uuid4().hex


class Caller:
    """Sends calls from one thread. Every rank has one, since each fetches its own payloads.

    patience: seconds for which a lost controller is waited for. session: rank 0's, where this is for another thread
    of it."""

    def __init__(
        self,
        environment: Environment,
        shutdown: ShutdownRequest,
        patience: float = START_PATIENCE,
        session: Session | None = None,
    ) -> None:
        self.shutdown, self.patience, self._session = shutdown, patience, session
        self.url = environment.url
        self._environment = environment
        self._client = self.client()

    def client(self) -> Client:
        """A new one, for another thread; it does not wait for a lost controller."""
        return Client(self._environment.url, self._environment.token)

    def call(self, call: Call[T]) -> T:
        """Send one call.

        Raises:
            LeaveRequestedError: a request to leave came while the controller did not answer.
            ReplacedError: the controller does not count on this incarnation any more.
            Refused, ControllerLost: see `controller.client`.
        """
        give_up = time.monotonic() + self.patience
        mended, refusal, seen = 0, None, self.mends
        while True:
            self._client.patience = min(SLICE, max(0.0, give_up - time.monotonic()))
            try:
                if refusal is not None:
                    self.mend(seen, self._client)
                    mended, refusal = mended + 1, None
                seen = self.mends
                return self._client.send(call)
            except Refused as error:
                superseded = error.code == m.ErrorCode.STALE_INCARNATION
                if (error.code in _BEHIND or (superseded and self.leads)) and mended < MENDS:
                    refusal = error
                    continue
                if error.code in _GONE:
                    raise ReplacedError(str(error)) from error
                raise
            except ControllerLost as error:
                if self.shutdown:
                    raise LeaveRequestedError(f"{self.shutdown.reason}; meanwhile {error}") from error
                if time.monotonic() >= give_up:
                    raise
                log.warning("%s; waiting for it", error)

    @property
    def leads(self) -> bool:
        """Whether this replica leads several ones: a store that has lost this takes another one for the leader."""
        return self._session is not None and self._session.leads

    @property
    def mends(self) -> int:
        """How often the controller was given what it had lost."""
        return 0 if self._session is None else self._session.mends

    def mend(self, seen: int, client: Client) -> None:
        """The controller does not know what it should: rank 0 declares it, the others wait for that."""
        if self._session is None:
            self.shutdown.pause(LEADER_SECONDS / MENDS)
        else:
            self._session.mend(seen, client)

    def close(self) -> None:
        self._client.close()


class Session(Caller):
    """See the module's docstring. `close` deregisters and ends the thread."""

    def __init__(self, environment: Environment, shutdown: ShutdownRequest, world: int) -> None:
        super().__init__(environment, shutdown)
        self._world = world
        self._beats: threading.Thread | None = None
        self._closed = threading.Event()
        self._fatal: PolicyError | None = None
        self.gauges: dict[str, float] = {}
        self.status = "starting"
        self.version = -1
        self.troubles: list[Callable[[], str]] = []
        """Each reports what goes wrong in the background, for the user to see; "": nothing."""
        self.anchor_asked = False
        self.members_epoch = 0
        """Membership epoch of several policy replicas, as the newest heartbeat was answered."""
        self.leads_since = 0
        """Membership epoch since which this replica leads several ones; 0: it does not."""
        self._several = False
        self.takes_part = True
        """Whether its weights are those of the job: one of several policy replicas has to join the others first."""
        self.profile: m.ProfileStatus | None = None
        """How the newest profile stands."""
        self.profile_order: m.ProfileOrder | None = None
        """The newest profile that was asked for."""
        self.history = RejoinLog()
        self.reply: m.RegisterReply
        self._mending = threading.Lock()
        self._mends = 0
        self._told: object = None

    def register(self, resume_step: int | None = None, snapshot: m.LedgerSnapshot | None = None) -> m.RegisterReply:
        """Register (again, when it has turned out where the weights come from) and begin to beat.

        snapshot: what the checkpoint of `resume_step` holds of the ledger.

        Raises `Unauthorized`, `Refused`, `ControllerLost`: see `controller.client`."""
        request = m.RegisterRequest(
            request_id=request_id(),
            role="policy",
            name=self._environment.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            parent_pid=self._environment.parent or os.getppid(),
            world_size=self._world,
            resume_step=resume_step,
            snapshot=snapshot,
            newest_publication=self.history.newest_publication,
        )
        if isinstance(self._fatal, LeftBehindError):
            self._fatal = None
        self.reply = self.call(api.register(request))
        self.profile_order = None  # of the incarnation before: who asked for it asks again
        self.history.registered(request, self.reply)
        config = Config.model_validate(self.reply.config)
        self._several = config.policy.parallelism.n_init_replicas > 1
        self.takes_part, self.leads_since = not self._several, 0
        self.patience = config.controller.controller_lost_timeout
        self.shutdown.grace = config.launcher.shutdown_timeout
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._beats.start()
        return self.reply

    def call(self, call: Call[T]) -> T:
        """Send as `Caller.call` does; raises `ReplacedError` too when a heartbeat was answered so."""
        if self._fatal is not None:
            raise self._fatal
        return super().call(call)

    # ---- a controller that lost history -------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.leads_since > 0

    @property
    def mends(self) -> int:
        return self._mends

    def mend(self, seen: int, client: Client) -> None:
        """Declare this trainer and replay what the controller lost, unless another thread has done so since `seen`.

        Raises:
            ReplacedError: the controller knows a later trainer.
            LeftBehindError: this one of several does not take part yet, or the others have trained more steps: it has
                to register anew.
            PolicyError: the history cannot be declared; training goes on from a checkpoint.
            Refused, ControllerLost: see `controller.client`.
        """
        with self._mending:
            if seen != self._mends:
                return
            if not self.takes_part:
                raise LeftBehindError(
                    f"the controller does not know {self.reply.replica_id} any more, which has not joined the other "
                    f"policy replicas yet: it has to register anew"
                )
            try:
                self._declare(client)
            except Refused as error:
                if error.code in (m.ErrorCode.STALE_EPOCH, m.ErrorCode.STALE_INCARNATION):
                    raise ReplacedError(str(error)) from error
                if error.code == m.ErrorCode.CONFLICT and self._several:
                    raise LeftBehindError(f"the other policy replicas went on without this one: {error}") from error
                if error.code in (m.ErrorCode.CONFLICT, m.ErrorCode.BAD_REQUEST):
                    raise PolicyError(
                        f"the controller lost history that cannot be declared again: {error}"
                    ) from error
                raise
            self._mends += 1

    def _declare(self, client: Client) -> None:
        reply, claim = self.reply, self.history.claim()
        request = DeclareRequest(
            registration=self.history.registration,
            name=self._environment.name,
            incarnation=reply.incarnation,
            policy_epoch=reply.policy_epoch,
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=self._world,
            leads=self.leads_since,
            **claim,
        )
        answer = client.send(api.declare(reply.replica_id, request))
        if answer.needs_snapshot:
            snapshot = self.history.snapshot()
            if snapshot is None:
                raise NoCheckpointError(
                    f"the controller's store lost all steps from {answer.replay_from} on; this trainer remembers "
                    f"those from {request.first} on, and no checkpoint has the others"
                )
            request = request.model_copy(update={"snapshot": snapshot})
            answer = client.send(api.declare(reply.replica_id, request))
        missing = self.history.since(answer.replay_from)
        log.warning("the controller lost history: %d steps are replayed to it", len(missing))
        for trained in missing:
            client.send(
                api.recommit_step(
                    trained.step,
                    ReplayRequest(
                        replica_id=reply.replica_id,
                        incarnation=reply.incarnation,
                        policy_epoch=reply.policy_epoch,
                        table=trained.table,
                        metrics=trained.metrics,
                        at=trained.at,
                        validations=list(trained.validations),
                    ),
                )
            )

    # ---- identity and end ---------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The fields that every request of training carries."""
        return {
            "request_id": request_id(),
            "replica_id": self.reply.replica_id,
            "incarnation": self.reply.incarnation,
            "policy_epoch": self.reply.policy_epoch,
        }

    def say(self, status: str) -> None:
        """Set what heartbeats say this replica is doing."""
        self.status = status

    def take_part(self) -> None:
        """Train with the other policy replicas from now on."""
        self.takes_part = True

    def lead_since(self, epoch: int, publication: Publication | None) -> None:
        """Commit and publish from now on, after this publication of another replica; epoch 0: no longer."""
        self.leads_since = epoch
        if not epoch:
            return
        self.reply = self.reply.model_copy(update={"publication": publication})
        self.history.heard(0 if publication is None else publication.id)

    def take_anchor_request(self) -> bool:
        """Whether replicas wait for a full version because they can read nothing that there is; asked once."""
        asked, self.anchor_asked = self.anchor_asked, False
        return asked

    def declare_again(self) -> None:
        """The controller lost once more what was declared to it: the next heartbeat declares it again."""
        self._told = None

    @property
    def profile_is_asked(self) -> bool:
        """Whether there is a profile to take; the controller repeats it until it hears that it was taken."""
        order, taken = self.profile_order, self.profile
        return order is not None and (taken is None or taken.profile_id != order.profile_id)

    def take_profile(self) -> m.ProfileOrder:
        """The profile that was asked for; from here on it is under way."""
        order = self.profile_order
        assert order is not None
        self.profile = m.ProfileStatus(**order.model_dump(), state="waiting")
        return order

    def another(self) -> Caller:
        """For another thread: a client serves one."""
        return Caller(self._environment, self.shutdown, self.patience, self)

    def leave(self, reason: str) -> None:
        """End the heartbeats and deregister; a controller that does not answer is not waited for."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join(timeout=SLICE)
            self._client.patience = SLICE
            if self.profile is not None or any(report() for report in self.troubles):
                self._beat_once(self._client, self.reply)  # how these ended nobody has heard yet
            farewell = api.deregister(self.reply.replica_id, self.reply.incarnation, reason)
            try:
                try:
                    self._client.send(farewell)
                except Refused as error:
                    if error.code != m.ErrorCode.UNKNOWN_REPLICA:
                        raise
                    self.mend(self._mends, self._client)
                    self._client.send(farewell)
            except (ControllerError, PolicyError) as error:
                log.warning("left without deregistering: %s", error)
        self.close()

    def _beat(self) -> None:
        with self.client() as client:
            while not self._closed.wait(self.reply.heartbeat_interval):
                self._beat_once(client, self.reply)

    def _mend_beside(self, seen: int, client: Client) -> bool:
        """In the heartbeat's thread, while the main one may be training for minutes. Returns whether it is done."""
        try:
            self.mend(seen, client)
        except PolicyError as error:
            self._fatal = error
        except ControllerError as error:
            log.warning("the history that the controller lost could not be declared: %s", error)
            return False
        return True

    def _compare_history(self, reported: tuple[int, int], known: tuple[int, int], seen: int, client: Client) -> None:
        """Declare what the controller has lost.

        reported, known: committed steps and newest publication, as the controller and this replica have them."""
        if reported[0] >= known[0] and reported[1] >= known[1]:
            self._told = None
        elif self._told != (reported, known) and self._mend_beside(seen, client):
            self._told = reported, known  # where it helps it helps at once

    def _beat_once(self, client: Client, reply: m.RegisterReply) -> None:
        request = m.HeartbeatRequest(
            incarnation=reply.incarnation,
            version=self.version,
            status=self.status,
            gauges=dict(self.gauges),
            trouble="; ".join(filter(None, (report() for report in self.troubles)))[:TROUBLE],
            profile=self.profile,
        )
        known, seen = self.history.known, self._mends
        try:
            answer = client.send(api.heartbeat(reply.replica_id, request))
        except Refused as error:
            log.warning("heartbeat refused: %s", error)
            if reply is not self.reply:
                return  # it was the beat of an earlier registration
            if error.code == m.ErrorCode.STALE_INCARNATION:
                self._fatal = ReplacedError(str(error))
            elif error.code == m.ErrorCode.UNKNOWN_REPLICA:
                self._mend_beside(seen, client)
            return
        except ControllerError as error:
            log.debug("no heartbeat: %s", error)
            return
        if reply is self.reply:
            reported = (answer.committed_steps, answer.newest_publication)
            self._compare_history(reported, known, seen, client)
        self.members_epoch = answer.members_epoch
        for command in answer.commands:
            if command == "checkpoint":
                self.shutdown.checkpoint_asked = True
            elif command == "anchor":
                self.anchor_asked = True
            else:
                self.shutdown.request(f"command {command}")
        if reply is self.reply:
            self.profile_order = answer.profile or self.profile_order
        if answer.phase in (m.Phase.FAILED, m.Phase.STOPPED):
            self.shutdown.request(f"the job has {answer.phase}")
