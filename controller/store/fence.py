"""A Redis connection that cannot write once another controller has taken over.

The job has an epoch key that each starting controller raises. This connection always WATCHes it: the check for
the next transaction travels at the end of the one before, so a transaction costs a single round trip:

    ──▶ MULTI … EXEC  WATCH epoch  GET epoch  GET seq
    ◀── EXEC is nil if the epoch changed after the last WATCH; the GETs tell whether it changed before that

`seq` counts transactions. A server that comes back with an older count than was acknowledged has lost history.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ExecAbortError

from controller.store.errors import Fenced, HistoryLost

Argument = bytes | memoryview | str | int | float
Command = tuple[Argument, ...]

REPLY_TIMEOUT = 15.0
"""Seconds for one transaction: a slow fsync takes one or two, a dead server forever."""


class FencedConnection:
    """One connection on which every transaction depends on the epoch. Not safe for concurrent use."""

    def __init__(self, pool: ConnectionPool, token_key: str, seq_key: str) -> None:
        self._pool = pool
        self._seq_key = seq_key
        self._connection: AbstractConnection | None = None
        self._tail: list[Command] = [("WATCH", token_key), ("GET", token_key), ("GET", seq_key)]
        self.fencing_token = 0
        self.seq = 0

    async def execute(self, commands: Sequence[Command]) -> None:
        """Run `commands` as one transaction, or raise.

        Raises:
            Fenced: another controller holds the job.
            HistoryLost: the server's state is older than what was acknowledged.
            RedisError, OSError: nothing is known about the transaction; sending it again is right.
        """
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                connection = self._connection or await self._open()
                await self._transact(connection, commands)
        except BaseException:
            await self.close()
            raise

    async def wait_for_file(self, marker: str, seconds: float) -> bool:
        """Whether everything executed so far reached the append-only file within `seconds` (WAITAOF).

        On a connection of its own, so that transactions go on meanwhile. WAITAOF waits for the writes of its own
        connection: `marker` is written first, and only while the epoch is ours. Raises as `execute`.
        """
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                acknowledged = self.seq  # it rises while this connection's answer is on its way
                await connection.send_packed_command(connection.pack_commands(self._tail))
                _, fencing_token, seq = [await _reply(connection) for _ in self._tail]
                self._check(fencing_token, seq, acknowledged)
                sync = ("WAITAOF", 1, 0, int(seconds * 1000))
                commands: list[Command] = [("MULTI",), ("SET", marker, self.seq), ("EXEC",), sync]
                await connection.send_packed_command(connection.pack_commands(commands))
                *_, result, (local, _replicas) = [await _reply(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)
        if result is None:
            raise Fenced("another controller took over this job while its last changes reached the disk")
        return bool(local)

    async def _open(self) -> AbstractConnection:
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        self._connection = connection
        await connection.send_packed_command(connection.pack_commands(self._tail))
        _, fencing_token, seq = [await _reply(connection) for _ in self._tail]
        self._check(fencing_token, seq)
        self.seq = int(seq or 0)  # the last transaction may have been executed although its answer was lost
        return connection

    async def _transact(self, connection: AbstractConnection, commands: Sequence[Command]) -> None:
        following = self.seq + 1
        packed = connection.pack_commands(
            [("MULTI",), *commands, ("SET", self._seq_key, following), ("EXEC",), *self._tail]
        )
        await connection.send_packed_command(packed)
        for _ in range(len(commands) + 2):  # OK, then QUEUED for each
            await _reply(connection)
        result = await _reply(connection)
        _, fencing_token, seq = [await _reply(connection) for _ in self._tail]
        if result is None:
            self._check(fencing_token, seq)
            raise HistoryLost("the epoch of this job was changed by another process")
        for item in result:
            if isinstance(item, Exception):
                raise ExecAbortError(f"a command of the transaction failed: {item}")
        self.seq = following
        if (
            int(fencing_token or 0) != self.fencing_token
        ):  # changed between EXEC and WATCH, so the WATCH would not notice:
            await self.close()  # this transaction counts, and the next one checks before it begins

    def _check(self, fencing_token: bytes | None, seq: bytes | None, acknowledged: int | None = None) -> None:
        stored_token = int(fencing_token or 0)
        if stored_token > self.fencing_token:
            raise Fenced(
                f"another controller took over this job (epoch {stored_token}, this one has {self.fencing_token})"
            )
        stored = int(seq or 0)
        known = self.seq if acknowledged is None else acknowledged
        if stored_token < self.fencing_token or stored < known:
            raise HistoryLost(
                f"Redis came back with an older state (transaction {stored} of {known}): "
                "the controller must restart to rebuild from it"
            )

    async def close(self) -> None:
        """Disconnect; the next transaction opens a new connection and checks again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)


async def _reply(connection: AbstractConnection) -> Any:
    return await connection.read_response(timeout=math.inf)  # `execute` limits the time of the whole
