"""The trainer's turns on devices that rollout replicas have too (`placement.share = "time"`).

    registered ─▶ take ─▶ model, restore, publish ─▶ give ─▶ wait for a batch ─▶ take ─▶ train, publish ─▶ give …

Between its turns all tensors of the models and optimizers are in host memory; process groups, CUDA contexts and what
libraries keep stay. On a CPU there is nothing to move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from controller.client import calls as api
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.ranges import span
from policy_worker.session import Session
from schema.wire.messages.time_share import TurnRequest
from weight_sync.parking import Parked

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds of one call: so often a request to leave is looked at."""
LEAVING_SHARE = 0.3
"""Share of the grace in which a replica leaves: for rollout replicas to fall asleep. Then it goes on without."""


class TimeShare:
    """All ranks call alike. `session` on rank 0 only."""

    def __init__(self, group: RankGroup, session: Session | None, shutdown: ShutdownRequest) -> None:
        self._group, self._session, self._shutdown = group, session, shutdown
        self.tensors: Callable[[], Iterable[Tensor]] = tuple
        """The tensors that are to leave the devices."""
        self._parked: Parked | None = None
        self._leaves_at: float | None = None
        self._changed: float | None = None
        """When the present turn, or the rollouts', began."""
        self._seconds = {True: 0.0, False: 0.0}
        """Seconds of the trainer's turns and of all others, switches included in the turn that they begin."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last switch in each direction."""

    def take(self) -> None:
        """Wait until no rollout replica holds memory of the devices, and come back to them. A collective.

        Raises `Refused`, `ControllerLost`, `LeaveRequestedError`, `ReplacedError`: see `Session.call`."""
        self._count(own_turn=False)
        began, self._leaves_at = time.monotonic(), None
        with span("wait for the devices"):
            while not self._group.lead(self._is_mine):
                pass
        granted = time.monotonic()
        if self._parked is not None:
            with span("onload"):
                self._parked.restore()
            self._parked = None
        self.metrics |= {"turn_wait_seconds": granted - began, "onload_seconds": time.monotonic() - granted}

    def give(self) -> None:
        """Leave the devices, and say so. A collective. Raises as `take`."""
        self._count(own_turn=True)
        began = time.monotonic()
        with span("offload"):
            self._parked = Parked(self.tensors())
        self._group.barrier()
        self._group.lead(lambda: self._ask(holds=False))
        self.metrics["offload_seconds"] = time.monotonic() - began
        total = sum(self._seconds.values())
        self.metrics["trainer_turn_fraction"] = self._seconds[True] / total if total else 1.0

    def _count(self, *, own_turn: bool) -> None:
        now = time.monotonic()
        if self._changed is not None:
            self._seconds[own_turn] += now - self._changed
        self._changed = now

    def _is_mine(self) -> bool:
        if self._ask(holds=True):
            return True
        if not self._shutdown:
            return False
        now = time.monotonic()
        self._leaves_at = self._leaves_at or now + LEAVING_SHARE * self._shutdown.grace
        if now < self._leaves_at:
            return False
        log.warning("rollout replicas still hold the devices, and this replica has to leave: it goes on next to them")
        return True

    def _ask(self, *, holds: bool) -> bool:
        session = self._session
        assert session is not None
        reply, wait_s = session.reply, POLL_S if holds else 0.0
        request = TurnRequest(incarnation=reply.incarnation, holds=holds, wait_s=wait_s)
        return session.call(api.turn(reply.replica_id, request)).yours
