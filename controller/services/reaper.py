"""The reaper does what time brings: leases expire, silent replicas are lost, a start takes too long, the number
of replicas follows the need."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from controller.cancellation import end
from controller.ledger.group_table import GroupTable
from controller.services.autoscale import AutoscaleService
from controller.services.replicas import ReplicaService
from controller.services.trainers.members import MemberService
from controller.state.job import JobState
from controller.state.situation import sentence
from controller.store import StoreUnavailable
from controller.store.lock import elapsed
from controller.store.payload_files import PayloadFiles
from schema.wire.messages import Phase

log = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between looks at the clock: small against every time-out of the config."""

SWEEP = 2.0
"""Seconds between looks at the directory of payloads: what is trained takes no room for long."""

FORGIVEN = 2.0
"""Seconds without a look at the clock that count as a downtime; less is a busy machine."""


class Reaper:
    """Runs `tick` again and again until `stop`."""

    def __init__(
        self, job: JobState, replicas: ReplicaService, members: MemberService, autoscale: AutoscaleService
    ) -> None:
        self._job, self._replicas, self._members, self._autoscale = job, replicas, members, autoscale
        self._task: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._next_sweep = 0.0

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends only by `stop` or by a bug, and then nothing would expire any more."""
        self._task = asyncio.create_task(self._run(), name="reaper")
        return self._task

    async def stop(self) -> None:
        await end([task for task in (self._task, self._sweeping) if task is not None])

    async def _run(self) -> None:
        looked_at = elapsed()
        while True:
            await asyncio.sleep(TICK)
            try:
                self._job.store.require()
                self.forgive(elapsed() - looked_at - TICK)
                await self.tick()
                looked_at = elapsed()
            except StoreUnavailable as error:
                log.debug("no upkeep while the store is away: %s", error)

    def forgive(self, gap: float) -> None:
        """No replica could beat or renew while Redis was away or this process was suspended: then none is late."""
        if gap > FORGIVEN:
            log.warning("no call could be served for %.1f s: leases and heartbeats are extended by it", gap)
            self._job.forgive_downtime(self._job.clock() - gap)

    async def tick(self) -> None:
        """One look at the clock. Raises `StoreUnavailable`."""
        job, now = self._job, self._job.clock()
        job.store.require()
        self._replicas.lose_silent(now)
        self._members.tick(now)
        self._expire_leases(now)
        self._check_start(now)
        if job.rewards.may_probe(now):
            job.lease_signal.notify()
        job.look_for_rows()
        job.settle()
        self._autoscale.tick(now)
        sentence(job)  # so that it is known since when
        await job.save()
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        """Look for files of payloads that are no longer needed; a directory that hangs holds up nothing else."""
        files, table = self._job.payload_files, self._job.progress
        if files is None or not isinstance(table, GroupTable) or elapsed() < self._next_sweep:
            return
        if self._sweeping is not None:
            if not self._sweeping.done():
                return
            self._sweeping.result()
        self._next_sweep = elapsed() + SWEEP
        self._sweeping = asyncio.create_task(self._sweep(files, table), name="payload-sweep")

    async def _sweep(self, files: PayloadFiles, table: GroupTable) -> None:
        with suppress(StoreUnavailable):  # the next one does it
            await files.sweep(table, self._job.save)

    def _expire_leases(self, now: float) -> None:
        job = self._job
        expired = job.ledger.expire(now) + job.validation.expire(now, job.wall())
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
        missing = self._replicas.missing()
        if not missing:
            job.facts.assembled = True
            return
        registered = ", ".join(sorted(replica.name for replica in job.registry)) or "none"
        lacking = " and ".join(f"{count} {role} replica(s)" for role, count in sorted(missing.items()))
        detail = f"{lacking} did not register within controller.start_timeout = {limit:g} s; registered: {registered}"
        job.end(Phase.FAILED, detail)
