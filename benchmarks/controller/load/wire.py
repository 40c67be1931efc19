"""HTTP/1.1 with keep-alive over an asyncio protocol: one request at a time, bytes in and bytes out.

It checks the status and counts the bytes, nothing else, so that the load generator is not what is measured.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


class BadAnswerError(Exception):
    """An answer other than 2xx, or none."""


class Connection(asyncio.Protocol):
    """One connection. `request` sends parts as they are and answers with status and body."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parts: list[bytes] = []
        self._have = self._need = self._body = self._status = 0

    @classmethod
    async def open(cls, url: str) -> Connection:
        address = urlsplit(url)
        loop = asyncio.get_running_loop()
        assert address.hostname is not None
        assert address.port is not None
        _, connection = await loop.create_connection(cls, address.hostname, address.port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is a transport in all but its base

    def request(self, *parts: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._answer is None, "one request at a time"
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts) if len(parts) > 1 else self._transport.write(parts[0])
        return self._answer

    def data_received(self, data: bytes) -> None:
        if not self._need:
            data = b"".join((*self._parts, data)) if self._parts else data
            self._parts, self._have = [], 0
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._parts = [data]
                return
            self._status, self._body = int(data[9:12]), end + 4
            self._need = self._body + _length(data[:end])
        self._parts.append(data)
        self._have += len(data)
        if self._have >= self._need:
            body = b"".join(self._parts)[self._body :] if len(self._parts) > 1 else data[self._body :]
            self._parts, self._have, self._need = [], 0, 0
            answer, self._answer = self._answer, None
            if answer is not None and not answer.done():
                answer.set_result((self._status, body))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BadAnswerError(f"the connection was closed: {error}"))

    def close(self) -> None:
        self._transport.close()


def _length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    if at < 0:
        return 0
    end = head.find(b"\r\n", at)
    return int(head[at + 15 : end if end >= 0 else len(head)])


def head(method: str, path: str, token: str, length: int | None = None, kind: str = "application/json") -> bytes:
    """The head of a request, without the final empty line if the length of the body is still to come."""
    lines = f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\ncontent-type: {kind}\r\n"
    return (lines if length is None else f"{lines}content-length: {length}\r\n\r\n").encode()


def checked(answer: tuple[int, bytes]) -> bytes:
    """The body of a 2xx answer. Raises `BadAnswerError`."""
    status, body = answer
    if not 200 <= status < 300:
        raise BadAnswerError(f"HTTP {status}: {body[:300].decode(errors='replace')}")
    return body
