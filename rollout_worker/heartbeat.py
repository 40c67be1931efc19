"""Heartbeats: leases are renewed, numbers reported; lost leases and commands come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from controller.client import calls as api
from rollout_worker.engines.base import Engine
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.session import Session
from rollout_worker.shutdown import ShutdownRequest
from rollout_worker.weights.follower import WeightFollower
from schema.wire.messages import HeartbeatReply, HeartbeatRequest

PARENT_CHECK_S = 0.5
MOST_TROUBLE = 4096


class Heartbeat:
    """One loop from registration to leaving, even while the engine boots."""

    def __init__(
        self, session: Session, leases: LeaseTable, metrics: Metrics, shutdown: ShutdownRequest, parent: int | None
    ) -> None:
        self._session, self._leases, self._metrics = session, leases, metrics
        self._shutdown, self._parent = shutdown, parent
        self.status = "starting"
        self.engine: Engine | None = None
        self.weights: WeightFollower | None = None
        self.on_lost: Callable[[list[str]], None] = lambda lease_ids: None

    async def run(self) -> None:
        """For ever. Raises `ControllerError`, `SupersededError`, `JobOverError`."""
        while True:
            reply = await self._session.call(lambda session: api.heartbeat(session.replica_id, self._beat()))
            if reply.lost_leases:
                self.on_lost(await self._session.declare(reply.lost_leases))
            self._obey(reply)
            await self._pause(self._session.reply.heartbeat_interval)

    def _beat(self) -> HeartbeatRequest:
        engine, weights = self.engine, self.weights
        return HeartbeatRequest(
            incarnation=self._session.incarnation,
            leases=self._leases.lease_ids,
            version=-1 if engine is None else engine.version,
            fetching=0 if weights is None else weights.fetching,
            status=self.status,
            trouble="" if weights is None else weights.trouble[:MOST_TROUBLE],
            gauges={} if engine is None else self._metrics.read(time.monotonic(), engine.stats()),
        )

    def _obey(self, reply: HeartbeatReply) -> None:
        if "stop" in reply.commands:
            self._shutdown.ask("stop", "the controller asked for it")
        elif "drain" in reply.commands:
            self._shutdown.ask("drain", "the controller asked for it")

    async def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._shutdown.check_parent(self._parent)
            await asyncio.sleep(min(left, PARENT_CHECK_S))
