"""Whether Redis answers: a PING again and again, and a pure decision from what came of each.

    answer    any reply, an error too        ok        LOADING is one: the server reads its append-only file
    refused   nobody listens                 away      it has ended, and its supervisor starts it again; or its socket
                                                       was removed
    silence   accepted, no reply in time     hung      after `HUNG_AFTER` looks in a row; stopped, or its disk blocks
                                             restart   after `RESTART_AFTER` looks without an answer, if the server is
                                                       the job's own

Looks are counted, not seconds: a launcher that was suspended itself has seen one silence, however long it slept.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from launcher.plan.redis_server import RedisServer

Opener = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
LOOK_EVERY = 5.0
"""Seconds from one PING to the next, and how long an answer is waited for."""
HUNG_AFTER = 2
"""Looks: with an fsync that takes seconds the server stands still, and goes on."""
RESTART_AFTER = 12
"""Looks, a minute: waiting for a slow disk loses nothing, a restart costs the time to read the file again."""

OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Faults of a connection that say nothing about the server."""

Answer = Literal["answer", "refused", "silence"]
State = Literal["ok", "away", "hung"]


class Pulse:
    """The state of a server by its answers so far. restarts: whether one that does not answer is to be restarted."""

    def __init__(self, *, restarts: bool) -> None:
        self.state: State = "ok"
        self._restarts = restarts
        self._silent = self._unanswered = 0

    def take(self, answer: Answer) -> bool:
        """Take one answer; True if the server must be restarted now (once; looks are counted anew then)."""
        if answer == "answer":
            self._silent, self._unanswered, self.state = 0, 0, "ok"
            return False
        self._unanswered += 1
        self._silent = self._silent + 1 if answer == "silence" else 0
        if answer == "refused":
            self.state = "away"
        elif self._silent >= HUNG_AFTER:
            self.state = "hung"
        if not self._restarts or self._unanswered < RESTART_AFTER:
            return False
        self._silent = self._unanswered = 0
        return True


class RedisPulse:
    """Looks after one server until it is cancelled. `state` is what was found last."""

    def __init__(self, server: RedisServer, restart: Callable[[], None], event: Callable[[str], None]) -> None:
        self._server, self._restart, self._event = server, restart, event
        self._own = server.replica is not None
        self._pulse = Pulse(restarts=self._own)
        self.trouble = ""
        """The fault: hung, or away; empty: none."""

    async def look_forever(self) -> None:
        """Never raises for what the server does."""
        connect = await asyncio.to_thread(_opener, self._server.url)  # imports redis-py, may read authorities
        while True:
            began = time.monotonic()
            answer = await _look(connect)
            must_restart = answer is not None and self._pulse.take(answer)
            self._note(self._pulse.state)
            if must_restart:
                self._event(f"redis has not answered for {RESTART_AFTER * LOOK_EVERY:.0f} s: restarting it")
                self._restart()
            await asyncio.sleep(began + LOOK_EVERY - time.monotonic())

    def _note(self, state: State) -> None:
        trouble = "" if state == "ok" else state
        restarted = self._own and state == "away"  # it has ended, which its supervisor sees
        if trouble == self.trouble or restarted:
            return
        self.trouble = trouble
        if not trouble:
            self._event("redis answers again")
        elif trouble == "away":
            self._event("redis=away: it cannot be reached; bring the server of redis.url back")
        else:
            then = "it is restarted if it stays so" if self._own else "look after the server of redis.url"
            self._event(f"redis=hung: it takes connections and does not answer; {then}")


def _opener(url: str) -> Opener:
    """How to connect to the server of an address, which redis-py reads as it does for the controller."""
    from redis.asyncio import ConnectionPool, SSLConnection, UnixDomainSocketConnection

    from schema.util.tls import redis_options

    connection = ConnectionPool.from_url(url, **redis_options(url)).make_connection()  # type: ignore[no-untyped-call]
    if isinstance(connection, UnixDomainSocketConnection):
        return partial(asyncio.open_unix_connection, connection.path)
    tls = connection.ssl_context.get() if isinstance(connection, SSLConnection) else None
    return partial(asyncio.open_connection, connection.host, connection.port, ssl=tls)


async def _look(connect: Opener) -> Answer | None:
    """One PING on a connection of its own: what an earlier one left unanswered is not waited for. None: this process
    could not ask.

    It shows no password: that one is asked for is an answer too.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(LOOK_EVERY):
            reader, writer = await connect()
            writer.write(b"PING\r\n")
            return "answer" if await reader.read(1) else "refused"
    except TimeoutError:
        return "silence"
    except OSError as error:
        if error.errno in OWN_FAULTS:
            return None
        # These two: the queue of a unix socket whose server does not accept is full.
        return "silence" if error.errno in (errno.EAGAIN, errno.ENOTCONN) else "refused"
    finally:
        if writer is not None:
            writer.transport.abort()
