"""A bad network in front of a real controller: an HTTP proxy that breaks things, by a seed.

    client ──▶ delay? ──▶ cut | 503 ──▶ request, once, twice, again seconds later ──▶ controller
    client ◀── whole | in the middle cut | drop by drop | cut without an answer ◀────────┘

In a thread of its own, at the controller's port of another loopback address, since a client takes no proof from
another port. One request per connection, and the proof before it. `calm` lets everything pass; `hold` stops chosen
requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from urllib.parse import urlsplit

from schema.wire.messages.proof import PATH
from tests.support.waiting import PATIENCE

UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
HOST = "127.0.0.2"
PROOF = f"GET {PATH}".encode()
FAULTS = (
    "cut before", "cut after", "cut within", "unavailable", "duplicated", "duplicated late", "dripped", "delayed",
)  # fmt: skip


class FaultyProxy:
    """See the module's docstring. `rate`: how often something happens to a request."""

    def __init__(self, target: str, seed: int, rate: float) -> None:
        self._target, self._random, self.rate = urlsplit(target), Random(seed), rate
        self.faults: Counter[str] = Counter()
        self.hold: bytes | None = None
        """Requests that begin so wait here until this is None again; `holding` is set when one does."""
        self.holding = threading.Event()
        self._late: set[asyncio.Task[bytes]] = set()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._target.port}"

    def calm(self) -> None:
        self.rate = 0.0

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, HOST, self._target.port)

    def _fault(self) -> str:
        if self._random.random() >= self.rate:
            return ""
        fault = self._random.choice(FAULTS)
        self.faults[fault] += 1
        return fault

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await _read_request(reader)
            if request.startswith(PROOF):
                if not await self._serve(request, writer):
                    writer.close()
                    return
                request = await _read_request(reader)
            while self.hold is not None and request.startswith(self.hold):
                self.holding.set()
                await asyncio.sleep(0.01)
            await self._serve(request, writer)
        writer.close()

    async def _serve(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether all of the answer has passed."""
        fault = self._fault()
        if fault == "delayed":
            await asyncio.sleep(self._random.uniform(0.05, 1.0))
        if fault == "cut before":
            return False
        if fault == "unavailable":
            writer.write(UNAVAILABLE)
            return False
        if fault == "duplicated":
            await self._forward(request)
        elif fault == "duplicated late":
            late = asyncio.create_task(self._again(request, self._random.uniform(0.2, 4.0)))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        answer = await self._forward(request)
        if request.startswith(PROOF):
            answer = answer.replace(b"connection: close\r\n", b"", 1)
        if fault == "cut after":
            return False
        if fault == "cut within":
            writer.write(answer[: self._random.randrange(len(answer) or 1)])
        elif fault == "dripped":
            size = max(1, len(answer) // 10)
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await writer.drain()
                await asyncio.sleep(0.02)
        else:
            writer.write(answer)
        await writer.drain()
        return bool(answer) and fault != "cut within"

    async def _again(self, request: bytes, delay: float) -> bytes:
        await asyncio.sleep(delay)
        return await self._forward(request)

    async def _forward(self, request: bytes) -> bytes:
        """The whole answer; empty if the controller is not there."""
        try:
            reader, writer = await asyncio.open_connection(self._target.hostname, self._target.port)
        except OSError:
            return b""
        try:
            writer.write(request)
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """One request; the connection is used for no other."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head[:-4].split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*kept, b"connection: close", b"", b""]) + body


@contextmanager
def faulty_proxy(target: str, seed: int, rate: float) -> Iterator[FaultyProxy]:
    """A proxy for the duration of a block."""
    proxy, loop = FaultyProxy(target, seed, rate), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(PATIENCE)

    async def stop() -> None:
        server.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
