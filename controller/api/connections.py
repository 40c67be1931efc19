"""HTTP connections that cannot be held for nothing: uvicorn's protocol with limits on time and size.

| a client that …                                    | gets                                   |
|----------------------------------------------------|----------------------------------------|
| is one connection too many                         | 503 with Retry-After, closed           |
| connects and says nothing, or its head never ends  | closed after HEAD_SECONDS              |
| sends a head of more than MAX_HEAD bytes           | 431, closed                            |
| stops in the middle of a body                      | 408 (`controller.api.limits`)          |
| asks and does not read the answer                  | closed after READ_STALL without a byte |
| is silent between two requests                     | closed (uvicorn's keep-alive time-out) |

A connection has one call at a time (further ones wait in its socket), so the number of calls and of long-polls
that are held open is bounded by the number of connections.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from controller.services.errors import problem
from schema.wire.messages import ErrorCode

MAX_CONNECTIONS = 8192
"""A thousand replicas with a beat, a lease, a push and a poll each, twice."""
SPARE_FILES = 256
"""Descriptors that connections must leave: for Redis, logs and data."""
HEAD_SECONDS = 20.0
"""A head is a few hundred bytes: it comes in one packet or the client is not serious."""
MAX_HEAD = 64 * 1024
"""The longest legitimate one names the rows of a batch in its query: some ten thousand numbers."""
READ_STALL = 120.0
"""Longer than a trainer may be busy before it reads its batch."""

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def connection_limit() -> int:
    """How many connections there may be, after raising the limit of open files as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    available = wanted if soft == resource.RLIM_INFINITY else soft
    return max(16, min(MAX_CONNECTIONS, available - SPARE_FILES))


class PatientProtocol(HttpToolsProtocol):
    """See the module's docstring. `limited` makes a class with other limits."""

    max_connections = MAX_CONNECTIONS
    head_seconds = HEAD_SECONDS
    read_stall = READ_STALL

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = self._in_body = self._begins_in_body = False
        self._head_bytes = self._chunk = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @classmethod
    def limited(
        cls, max_connections: int, head_seconds: float = HEAD_SECONDS, read_stall: float = READ_STALL
    ) -> type[PatientProtocol]:
        """This protocol with these limits."""
        limits = {"max_connections": max_connections, "head_seconds": head_seconds, "read_stall": read_stall}
        return type("PatientProtocol", (cls,), limits)

    # ---- the head of a request ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(_FULL)
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._chunk, self._begins_in_body = len(data), self._in_body
        self._head_bytes += self._chunk
        super().data_received(data)
        idle = self.cycle is None or self.cycle.response_complete
        if self._in_head and self._head_bytes > MAX_HEAD:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._in_head or idle:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # Where the end of a body comes in one piece with it, how much of that is the head is unknown: none counts.
        self._in_head, self._in_body = True, False
        self._head_bytes = 0 if self._begins_in_body else self._chunk

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer behind a chunked body: it is not read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Bytes that are not HTTP get a problem document like every other fault."""
        answer = problem(ErrorCode.BAD_REQUEST, msg, status=400, headers={"connection": "close"})
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self._refuse(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body))

    # ---- the answer ---------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _watch_reader(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        else:
            self._write_timer = self.loop.call_later(self.read_stall, self._watch_reader, left)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
