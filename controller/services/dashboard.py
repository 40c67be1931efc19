"""The service gathers what the dashboard shows of the job that is served: its run directory, and the front page from
memory."""

from __future__ import annotations

import time

from controller.dashboard.view import RunView
from controller.services.job import JobService
from controller.services.replicas import ReplicaService
from controller.state.job import JobState
from schema.wire import messages as m
from schema.wire.messages.dashboard import Overview

FRESH = 1.0
"""Seconds for which a front page is handed out again: all viewers together ask the job once."""


class DashboardService(RunView):
    """See the module's docstring."""

    def __init__(self, job: JobState, status: JobService, replicas: ReplicaService) -> None:
        super().__init__(job.run_dir, job.steps)
        self._job, self._status, self._replicas = job, status, replicas
        self._made = (float("-inf"), b"")

    async def overview(self) -> bytes:
        """`Overview` as JSON."""
        now = time.monotonic()
        if now - self._made[0] >= FRESH:
            ledger = self._job.progress.status()
            overview = Overview(
                event=self._job.events.highest,
                job=self._status.status().model_dump(mode="json"),
                ledger=ledger if isinstance(ledger, m.LedgerStatus) else None,
                replicas=self._replicas.infos(),
            )
            self._made = now, overview.model_dump_json().encode()
        return self._made[1]
