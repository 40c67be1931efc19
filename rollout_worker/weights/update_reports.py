"""The outcomes of publications here are reported to the controller in the background: nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Literal

from controller.client import Refused
from controller.client import calls as api
from rollout_worker.session import Session
from schema.wire.messages import UpdateReport

log = logging.getLogger(__name__)

MOST_WAITING = 64
"""Reports that a controller which is away misses beyond these are not made up for."""
MOST_DETAIL = 4096


class UpdateReports:
    """Reports in the order in which they were made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[tuple[int, UpdateReport]] = deque(maxlen=MOST_WAITING)
        self._news, self._sending = asyncio.Event(), asyncio.Lock()

    def add(
        self, publication_id: int, status: Literal["applied", "unreadable"], detail: str, **measured: Any
    ) -> None:
        """Report what came of a publication. measured: further fields of `UpdateReport`."""
        report = UpdateReport(
            replica_id=self._session.replica_id,
            incarnation=self._session.incarnation,
            status=status,
            detail=detail[:MOST_DETAIL],
            **measured,
        )
        self._waiting.append((publication_id, report))
        self._news.set()

    async def run(self) -> None:
        """Send them, for ever. Raises `ControllerError`, `SupersededError`, `JobOverError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send what waits, and wait for what is being sent. Errors as `run`."""
        async with self._sending:
            while self._waiting:
                await self._send(*self._waiting.popleft())

    async def _send(self, publication_id: int, report: UpdateReport) -> None:
        def call(session: Session) -> api.Call[None]:
            identity = {"replica_id": session.replica_id, "incarnation": session.incarnation}
            return api.report_update(publication_id, report.model_copy(update=identity))

        try:
            await self._session.call(call)
        except Refused as error:  # a controller that lost history may not know the publication any more
            log.info("the controller does not take the report of publication %d: %s", publication_id, error)
