"""This replica's registration, and calls that renew it where the controller has forgotten it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from controller.client import AsyncClient, Call, Refused
from controller.client import calls as api
from rollout_worker.lease_table import LeaseTable
from schema.util.backoff import Backoff
from schema.wire.messages import ErrorCode, RegisterReply, RegisterRequest
from schema.wire.messages.recovery import DeclaredLeases, DeclareLeases

T = TypeVar("T")
log = logging.getLogger(__name__)

BACKOFF = Backoff(0.2, 2.0)
"""Back-off bounds in seconds while another replica holds the name."""
NAME_MARGIN = 3.0
"""Seconds beyond the time at which a silent holder loses its name: the controller looks twice a second."""


class SupersededError(Exception):
    """Another process has registered under this replica's name: this one must end."""


class NameTakenError(Exception):
    """Another replica lives under this replica's name: one of the two needs another one."""


class JobOverError(Exception):
    """The job has failed or was stopped: there is nothing to join."""


class Session:
    """Registration of one replica; `reply` is the newest answer to it."""

    def __init__(self, client: AsyncClient, name: str, leases: LeaseTable, parent: int | None = None) -> None:
        """parent: of the process, as the launcher counts it."""
        self._client, self._name, self._leases = client, name, leases
        self._parent = parent or os.getppid()
        self._lock = asyncio.Lock()
        self.newest_publication = 0
        """The highest publication id that was heard of."""
        self.reply: RegisterReply

    @property
    def replica_id(self) -> str:
        return self.reply.replica_id

    @property
    def incarnation(self) -> int:
        return self.reply.incarnation

    async def register(self) -> RegisterReply:
        """Register, declaring what is held. A name that another replica holds is waited for until that one, had it
        been silent, would have lost it.

        Raises `JobOverError`, `SupersededError`, `NameTakenError`, `ControllerError`.
        """
        request = RegisterRequest(
            request_id=secrets.token_hex(12),
            role="rollout",
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            parent_pid=self._parent,
            held_leases=self._leases.declared(),
            newest_publication=self.newest_publication,
        )
        self.reply = await self._once_free(request)
        log.info("registered as %s", self.reply.replica_id)
        return self.reply

    async def _once_free(self, request: RegisterRequest) -> RegisterReply:
        give_up, attempt = None, 0
        while True:
            try:
                return await self._client.send(api.register(request))
            except Refused as error:
                if error.code != ErrorCode.NAME_TAKEN:
                    raise _meaning(error) from error
                now = time.monotonic()
                if give_up is None:
                    log.warning("waiting for the name of this replica: %s", error.detail)
                    give_up = now + error.retry_after + NAME_MARGIN
                if now >= give_up:
                    raise NameTakenError(error.detail) from error
            attempt += 1
            await asyncio.sleep(BACKOFF.after(attempt))

    async def call(self, make: Callable[[Session], Call[T]]) -> T:
        """Send a call that names this replica, once more after registering again if it is not known.

        Raises `JobOverError`, `SupersededError`, `NameTakenError`, `ControllerError`.
        """
        seen = self.incarnation
        try:
            return await self._client.send(make(self))
        except Refused as error:
            if error.code != ErrorCode.UNKNOWN_REPLICA:
                raise _meaning(error) from error
        async with self._lock:
            if self.incarnation == seen:
                log.warning("the controller does not know this replica any more: registering again")
                await self.register()
        try:
            return await self._client.send(make(self))
        except Refused as error:
            raise _meaning(error) from error

    async def declare(self, lease_ids: Iterable[str]) -> list[str]:
        """Declare leases that the controller does not know, and may have forgotten. Returns those that it does not
        take back. Raises as `call`."""
        held = self._leases.declared(lease_ids)
        if not held:
            return []
        reply: DeclaredLeases = await self.call(
            lambda session: api.declare_leases(
                session.replica_id, DeclareLeases(incarnation=session.incarnation, leases=held)
            )
        )
        return reply.lost_leases

    async def leave(self, reason: str) -> None:
        """Deregister: the controller releases everything that is held. Raises `ControllerError`."""
        await self._client.send(api.deregister(self.replica_id, self.incarnation, reason))


def _meaning(error: Refused) -> Exception:
    if error.code in (ErrorCode.STALE_INCARNATION, ErrorCode.NOT_YOURS):
        return SupersededError(f"another process took over the name of this replica: {error.detail}")
    if error.code == ErrorCode.JOB_FAILED:
        return JobOverError(error.detail)
    return error
