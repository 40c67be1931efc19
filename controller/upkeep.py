"""What happens by itself as time passes: leases expire, silent replicas are lost, the lock is renewed."""

from __future__ import annotations

import asyncio
import logging

from controller.job import Job
from controller.membership import Membership
from controller.store import StoreUnavailable
from controller.store.state import LOCK_SECONDS
from schema.wire.messages import Phase

log = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between looks at the clock: small against every time-out of the config."""


class Upkeep:
    """Runs `tick` again and again until `stop`."""

    def __init__(self, job: Job, membership: Membership) -> None:
        self._job, self._membership = job, membership
        self._renewed_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="upkeep")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                await self.tick()
            except StoreUnavailable as error:
                log.debug("no upkeep while the store is away: %s", error)

    async def tick(self) -> None:
        """One look at the clock. Raises `StoreUnavailable`."""
        job, now = self._job, self._job.clock()
        if now - self._renewed_at > LOCK_SECONDS / 4:
            await job.store.renew_lock()
            self._renewed_at = now
        job.store.require()
        self._membership.lose_silent(now)
        self._expire_leases(now)
        self._check_start(now)
        job.settle()
        await job.save()

    def _expire_leases(self, now: float) -> None:
        job = self._job
        expired = 0 if job.ledger is None else job.ledger.expire(now)
        if job.validation is not None:
            expired += job.validation.expire(now)
        if expired:
            log.warning("%d leases expired and go to others", expired)
        waiting_for_stragglers = job.config.controller.straggler_timeout is not None
        if expired or waiting_for_stragglers:
            job.lease_signal.notify()
            job.batch_signal.notify()

    def _check_start(self, now: float) -> None:
        job = self._job
        limit = job.config.controller.start_timeout
        if job.facts.assembled or job.ended or now - job.opened_at <= limit:
            return
        missing = self._membership.missing()
        if not missing:
            job.facts.assembled = True
            return
        there = ", ".join(sorted(replica.name for replica in job.registry)) or "none"
        lacking = " and ".join(f"{count} {role} replica(s)" for role, count in sorted(missing.items()))
        detail = (
            f"{lacking} did not register within controller.start_timeout = {limit:g} s; registered: {there}"
        )
        job.end(Phase.FAILED, detail)
