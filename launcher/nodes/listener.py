"""The head's port. A connection is nobody until it has proven the token, and may cost the head next to nothing:

bytes        those of the proof
time         `PROVE` seconds, TLS included
number       `MOST_UNPROVEN` at once; one more ends the oldest one of the address that has the most of them
events       one in `SAID_EVERY` seconds, which counts
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from launcher.nodes.announcement import HeadAddress
from launcher.nodes.link import BUFFER, PROVE, NodeLink
from schema.util.proof_exchange import ProofError

MOST_UNPROVEN = 64
SAID_EVERY = 60.0
BACKLOG = 128
ABSENT = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""Errors that one of several addresses may have: on a machine without IPv6, say."""
PAUSE = 0.1
"""Seconds before the next attempt where the system cannot accept: it has no file descriptors left, say."""


class NodeListener:
    """Listens at the head's address and serves each connection that has proven the token.

    serve: gets the link of a node until that is over, and closes nothing.
    """

    def __init__(
        self,
        head: HeadAddress,
        token: str,
        silence: float,
        tls: ssl.SSLContext | None,
        serve: Callable[[NodeLink], Awaitable[None]],
        event: Callable[[str], None],
    ) -> None:
        self._head, self._token, self._silence, self._tls = head, token, silence, tls
        self._serve, self._event = serve, event
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], str] = {}
        """Addresses, the oldest first."""
        self._strangers, self._said = 0, float("-inf")

    def open(self) -> None:
        """Take the port; connections wait. Raises OSError."""
        infos = socket.getaddrinfo(
            self._head.listening_host(), self._head.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(infos):
            try:
                self._sockets.append(_listening(family, address))
            except OSError as error:
                if error.errno in ABSENT:
                    continue
                self._close_sockets()
                raise
        if not self._sockets:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    def start(self) -> None:
        """Accept connections from now on."""
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._sockets]

    async def close(self) -> None:
        """End all connections."""
        for task in (*self._accepting, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._accepting, *self._tasks, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for listener in self._sockets:
            listener.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(PAUSE)
                continue
            connection.setblocking(False)
            self._make_room()
            task = asyncio.create_task(self._care(connection, str(address[0])))
            self._unproven[task] = str(address[0])
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0)  # a flood of connections must not keep the loop from the others

    def _make_room(self) -> None:
        if len(self._unproven) < MOST_UNPROVEN:
            return
        ((crowd, _),) = Counter(self._unproven.values()).most_common(1)
        oldest = next(task for task, address in self._unproven.items() if address == crowd)
        del self._unproven[oldest]
        oldest.cancel()
        self._count_stranger(crowd, "too many others came")

    async def _care(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        transport: asyncio.Transport | None = None
        try:
            reader = asyncio.StreamReader(BUFFER)
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(PROVE):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                link = await NodeLink.to_node(reader, writer, self._silence, self._token, self._head)
        except (ProofError, OSError, TimeoutError) as error:
            self._count_stranger(address, str(error) or f"it has not proven anything for {PROVE:g} s")
            return
        else:
            self._unproven.pop(task, None)
            with suppress(asyncio.CancelledError):  # the head is leaving
                await self._serve(link)
            await link.close()
        finally:
            self._unproven.pop(task, None)
            if transport is None:
                connection.close()
            else:
                transport.abort()

    def _count_stranger(self, address: str, why: str) -> None:
        self._strangers += 1
        if time.monotonic() - self._said < SAID_EVERY:
            return
        count = "a connection" if self._strangers == 1 else f"{self._strangers} connections, the last one"
        self._event(
            f"{count} from {address} to {self._head} did not prove the token of this run ({why}): nothing was sent; "
            "it is a node that reads an earlier announcement, or another program"
        )
        self._strangers, self._said = 0, time.monotonic()


def _listening(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
