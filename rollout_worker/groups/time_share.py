"""The turns of a replica whose devices the trainer has too (`placement.share = "time"`).

    may I? ─▶ boot, work ─▶ the trainer's turn ─▶ engine.sleep ─▶ say so, may I? ─▶ engine.wake ─▶ work …

Groups stay under lease meanwhile, samples in the engine are kept, and weights that arrive are applied after the wake.
"""

from __future__ import annotations

import logging
import time

from controller.client import calls as api
from rollout_worker.engines.base import Engine
from rollout_worker.heartbeat import Heartbeat
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.ranges import span
from rollout_worker.session import Session
from schema.wire.messages.time_share import TurnRequest

log = logging.getLogger(__name__)

POLL_S = 20.0


class TimeShare:
    """See the module's docstring."""

    def __init__(self, session: Session, leases: LeaseTable, metrics: Metrics, heartbeat: Heartbeat) -> None:
        self._session, self._leases, self._metrics = session, leases, metrics
        self._heartbeat = heartbeat

    async def begin(self) -> None:
        """Wait until the devices are free for the first time. Raises as `Session.call`."""
        self._heartbeat.status = "waiting for the trainer to give the devices"
        while not await self._ask(holds=False):
            pass

    async def run(self, engine: Engine) -> None:
        """For ever. Raises `EngineError`, and as `Session.call`."""
        while True:
            if await self._ask(holds=True):
                continue
            began, said = time.monotonic(), self._heartbeat.status
            with span("sleep"):
                await engine.sleep()
            asleep = time.monotonic()
            self._leases.sleep(asleep)
            self._heartbeat.status = "asleep: the trainer has the devices"
            while not await self._ask(holds=False):
                pass
            asked = time.monotonic()
            with span("wake"):
                await engine.wake()
            awake = time.monotonic()
            self._leases.wake(awake)
            self._heartbeat.status = said
            self._metrics.extra.update(
                sleep_seconds=asleep - began, asleep_seconds=asked - asleep, wake_seconds=awake - asked
            )
            log.info(
                "slept for %.3f s; going to sleep took %.3f s, waking %.3f s",
                asked - asleep, asleep - began, awake - asked,
            )  # fmt: skip

    async def _ask(self, *, holds: bool) -> bool:
        """Say what is held; whether it may be. Answered at once where that has to change."""
        reply = await self._session.call(
            lambda session: api.turn(
                session.replica_id, TurnRequest(incarnation=session.incarnation, holds=holds, wait_s=POLL_S)
            )
        )
        return reply.yours
