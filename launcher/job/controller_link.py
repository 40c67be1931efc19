"""The launcher's calls to the controller, with the user's token."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TypeVar

from controller.client import AsyncClient, Call, ControllerError, ControllerLost
from controller.client import calls as api
from launcher.display.summary import Collected
from schema.wire.messages import JobStatus

T = TypeVar("T")
log = logging.getLogger(__name__)

READY_POLL = 0.05
"""Seconds between looks at a controller that is starting: the client's own retries back off to seconds, which
would be felt at every start."""
BRIEF = 3.0
"""Seconds of patience for notifications: without them the controller finds out by itself, later."""

COLLECT_PATIENCE = 20.0
"""Seconds to wait for a controller, or its Redis, that died just now: the summary needs both."""


class ControllerLink:
    """The controller of one job, which may be away for a while."""

    def __init__(self, url: str, token: str, tls_ca: str | None = None) -> None:
        self.url = url
        self._token, self._tls_ca = token, tls_ca
        self._client = AsyncClient(url, token, tls_ca=tls_ca)
        self.started = asyncio.Event()
        """Set once the controller was started; before, the port is closed."""

    async def ask(self, call: Call[T], patience: float = 0.0) -> T:
        """Send one call; a lost controller is waited for `patience` seconds. Raises `ControllerError`."""
        if not patience:
            return await self._client.send(call)
        async with AsyncClient(self.url, self._token, patience=patience, tls_ca=self._tls_ca) as client:
            return await client.send(call)

    async def notify(self, call: Call[T]) -> T | None:
        """Send something that is useful, not necessary; None if the controller does not answer."""
        if not self.started.is_set():
            return None
        try:
            return await self.ask(call, BRIEF)
        except ControllerError as error:
            log.debug("%s %s: %s", call.method, call.path, error)
            return None

    async def wait_ready(self, timeout: float) -> bool:
        """Wait until the controller serves; False after `timeout` seconds."""
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            try:
                await self.ask(api.ready())
            except ControllerLost:
                await asyncio.sleep(READY_POLL)
            else:
                return True
        return False

    async def is_healthy(self) -> bool:
        """Whether the controller's process answers at all (it may only miss Redis)."""
        try:
            await self.ask(Call("GET", "/healthz", lambda _: None))
        except ControllerError:
            return False
        return True

    async def collect(self, last: JobStatus | None) -> Collected:
        """Collect the controller's records at the end of a job. `last`: the newest status seen."""
        collected = Collected(status=last)
        try:
            collected.status = await self.ask(api.job(), COLLECT_PATIENCE)
            collected.ledger = await self.ask(api.ledger(), COLLECT_PATIENCE)
            collected.steps = await self.ask(api.steps(), COLLECT_PATIENCE)
            collected.validations = await self.ask(api.validations(), COLLECT_PATIENCE)
            collected.replicas = await self.ask(api.replicas(), COLLECT_PATIENCE)
        except ControllerError as error:
            collected.missing = str(error)
        return collected

    async def close(self) -> None:
        await self._client.close()
