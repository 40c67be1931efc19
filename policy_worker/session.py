"""What a policy replica and the controller say to each other: one registration, its calls, its heartbeats.

    register ──▶ reply: config, mode, committed steps
      ├─ call(…)             training's own calls, in the main thread
      └─ heartbeat thread    gauges out; commands in ─▶ departure, checkpoint_wanted

Rank 0 has the session, the other ranks only a `Caller`. A lost controller is waited for up to
`controller.controller_lost_timeout`, in slices short enough that a request to leave is noticed; then
`ControllerLost` is raised.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from typing import Any, TypeVar

from controller import api
from controller.api import Call
from controller.client import Client, ControllerError, ControllerLost, Refused
from policy_worker.errors import PolicyError, ReplacedError
from policy_worker.process import Departure, Environment
from schema.config import Config
from schema.wire import messages as m

T = TypeVar("T")
log = logging.getLogger(__name__)

START_PATIENCE = 60.0
"""Seconds to find the controller at first: it may be starting at the same time."""
SLICE = 3.0
"""Seconds of one round of retries: so often a request to leave is looked at."""
_GONE = (m.ErrorCode.STALE_INCARNATION, m.ErrorCode.UNKNOWN_REPLICA)


class LeaveRequestedError(PolicyError):
    """A request to leave came while the controller was out of reach."""

    exit_code = 0


def request_id() -> str:
    """A new id: the same request sent twice gets the same answer."""
    return uuid.uuid4().hex


class Caller:
    """Sends calls from one thread. Every rank has one, since each fetches its own payloads.

    patience: seconds for which a lost controller is waited for.
    """

    def __init__(
        self, environment: Environment, departure: Departure, patience: float = START_PATIENCE
    ) -> None:
        self.departure, self.patience = departure, patience
        self._client = Client(environment.url, environment.token)

    def call(self, call: Call[T]) -> T:
        """Send one call.

        Raises:
            LeaveRequestedError: a request to leave came while the controller did not answer.
            ReplacedError: the controller does not count on this incarnation any more.
            Refused, ControllerLost: see `controller.client`.
        """
        give_up = time.monotonic() + self.patience
        while True:
            self._client.patience = min(SLICE, max(0.0, give_up - time.monotonic()))
            try:
                return self._client.send(call)
            except Refused as error:
                if error.code in _GONE:
                    raise ReplacedError(str(error)) from error
                raise
            except ControllerLost as error:
                if self.departure:
                    raise LeaveRequestedError(f"{self.departure.reason}; meanwhile {error}") from error
                if time.monotonic() >= give_up:
                    raise
                log.warning("%s; waiting for it", error)

    def close(self) -> None:
        self._client.close()


class Session(Caller):
    """See the module's docstring. `close` deregisters and ends the thread."""

    def __init__(self, environment: Environment, departure: Departure, world: int) -> None:
        super().__init__(environment, departure)
        self._environment, self._world = environment, world
        self._beats: threading.Thread | None = None
        self._closed = threading.Event()
        self._fatal: PolicyError | None = None
        self.checkpoint_wanted = threading.Event()
        self.gauges: dict[str, float] = {}
        self.status = "starting"
        self.version = -1
        self.reply: m.RegisterReply

    def register(self, resume_step: int | None = None) -> m.RegisterReply:
        """Register (again, when it has turned out where the weights come from) and begin to beat.

        Raises:
            Unauthorized, Refused, ControllerLost: see `controller.client`.
        """
        request = m.RegisterRequest(
            request_id=request_id(),
            role="policy",
            name=self._environment.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            world_size=self._world,
            resume_step=resume_step,
        )
        self.reply = self.call(api.register(request))
        config = Config.model_validate(self.reply.config)
        self.patience = config.controller.controller_lost_timeout
        self.departure.grace = config.launcher.shutdown_timeout
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._beats.start()
        return self.reply

    def call(self, call: Call[T]) -> T:
        """As `Caller.call`; raises `ReplacedError` too when a heartbeat was told so."""
        if self._fatal is not None:
            raise self._fatal
        return super().call(call)

    def identity(self) -> dict[str, Any]:
        """The fields that every request of training carries."""
        return {
            "request_id": request_id(),
            "replica_id": self.reply.replica_id,
            "incarnation": self.reply.incarnation,
            "policy_epoch": self.reply.policy_epoch,
        }

    def leave(self, reason: str) -> None:
        """End the heartbeats and deregister; a controller that does not answer is not waited for."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join(timeout=SLICE)
            self._client.patience = SLICE
            try:
                self._client.send(api.deregister(self.reply.replica_id, self.reply.incarnation, reason))
            except ControllerError as error:
                log.warning("left without deregistering: %s", error)
        self.close()

    def _beat(self) -> None:
        with Client(self._environment.url, self._environment.token) as client:
            while not self._closed.wait(self.reply.heartbeat_interval):
                self._beat_once(client, self.reply)

    def _beat_once(self, client: Client, reply: m.RegisterReply) -> None:
        request = m.HeartbeatRequest(
            incarnation=reply.incarnation, version=self.version, status=self.status, gauges=dict(self.gauges)
        )
        try:
            answer = client.send(api.heartbeat(reply.replica_id, request))
        except Refused as error:
            if error.code in _GONE and reply is self.reply:  # else it was the beat of an earlier registration
                self._fatal = ReplacedError(str(error))
            log.warning("heartbeat refused: %s", error)
            return
        except ControllerError as error:
            log.debug("no heartbeat: %s", error)
            return
        for command in answer.commands:
            if command == "checkpoint":
                self.checkpoint_wanted.set()
            else:
                self.departure.request(f"command {command}")
        if answer.phase in (m.Phase.FAILED, m.Phase.STOPPED):
            self.departure.request(f"the job has {answer.phase}")
