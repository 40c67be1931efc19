"""Time and Redis of a simulation: an event loop whose clock jumps, and a server that lives in it.

`run` executes a coroutine in virtual time: whenever nothing is ready the clock jumps to the next timer, so hours
pass in milliseconds and a seed decides everything. `Redis` speaks RESP on connections that redis-py takes for
sockets, so the controller's store is the real one: its transactions, watches and time-outs are those of a server.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from redis.asyncio.connection import AbstractConnection

T = TypeVar("T")
TICK = 1e-7
"""Seconds between two parts of one stream: timers of the same time have no order."""


class Stuck(Exception):
    """Nothing is left that could ever happen."""


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits, and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9
        self.failure: BaseException | None = None

    def time(self) -> float:
        return self._virtual.now

    def fail(self, error: BaseException) -> None:
        """End the run with this error, whoever waits for what."""
        self.failure = self.failure or error
        self.stop()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time, and cancel what is left."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    except RuntimeError:
        if loop.failure is None:
            raise
        raise loop.failure from None
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


class Redis:
    """The commands that the controller uses, in one dictionary. `delay` gives the seconds of each way."""

    def __init__(self, random: Random, delay: Callable[[], float]) -> None:
        self._random, self.delay = random, delay
        self.data: dict[bytes, Any] = {}
        self.expires: dict[bytes, float] = {}
        self.versions: dict[bytes, int] = {}
        self.connections: dict[Wire, None] = {}
        """Not a set: its order would be that of addresses in memory, and no seed decides those."""
        self.up = True
        self.written: Callable[[object, list[list[bytes]]], None] = lambda client, commands: None
        """Called with each transaction, just before it is executed."""

    def connection_class(self, client: object) -> type[AbstractConnection]:
        """Connections of one client, so that `cut` can tell whose they are."""
        server = self

        class Connection(AbstractConnection):
            def __init__(self, host: str = "", port: int = 0, **options: Any) -> None:
                super().__init__(**options)

            async def _connect(self) -> None:
                if not server.up:
                    raise ConnectionError("the simulated server is down")
                self._reader = asyncio.StreamReader(limit=2**30)
                self._writer = Wire(server, self._reader, client)  # type: ignore[assignment]

            def repr_pieces(self) -> list[tuple[str, Any]]:
                return []

            def _host_error(self) -> str:
                return "simulation"

        return Connection

    def cut(self, client: object = None) -> None:
        """End the connections of one client, or of all; what is on its way to the server may still arrive."""
        for wire in list(self.connections):
            if client is None or wire.client is client:
                wire.cut(deliver=self._random.random() < 0.5)

    # ---- commands -----------------------------------------------------------------------------------------

    def _alive(self, key: bytes) -> Any:
        end = self.expires.get(key)
        if end is not None and asyncio.get_running_loop().time() >= end:
            self._remove(key)
        return self.data.get(key)

    def _touch(self, key: bytes) -> None:
        self.versions[key] = self.versions.get(key, 0) + 1

    def _remove(self, key: bytes) -> int:
        self.expires.pop(key, None)
        if self.data.pop(key, None) is None:
            return 0
        self._touch(key)
        return 1

    def do(self, command: list[bytes]) -> Any:
        """One command outside of a transaction's queue."""
        name = command[0].upper().decode().lower()
        return getattr(self, f"_do_{name}")(*command[1:])

    def version_of(self, key: bytes) -> int:
        self._alive(key)
        return self.versions.get(key, 0)

    def _do_info(self, *_: bytes) -> bytes:
        return b"redis_version:7.4.0\r\naof_enabled:1\r\nmaxmemory_policy:noeviction\r\n"

    def _do_get(self, key: bytes) -> Any:
        return self._alive(key)

    def _do_mget(self, *keys: bytes) -> Any:
        return [self._alive(key) for key in keys]

    def _do_set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        self.data[key] = value
        self.expires.pop(key, None)
        if options:
            assert options[0].upper() == b"PX"
            self.expires[key] = asyncio.get_running_loop().time() + int(options[1]) / 1000
        self._touch(key)
        return True

    def _do_mset(self, *parts: bytes) -> Any:
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            self._do_set(key, value)
        return True

    def _do_del(self, *keys: bytes) -> int:
        return sum(self._remove(key) for key in keys)

    _do_unlink = _do_del

    def _do_hset(self, key: bytes, *parts: bytes) -> int:
        self._touch(key)
        self.data.setdefault(key, {}).update(zip(parts[::2], parts[1::2], strict=True))
        return len(parts) // 2

    def _do_hdel(self, key: bytes, *names: bytes) -> int:
        self._touch(key)
        return sum(self.data.get(key, {}).pop(name, None) is not None for name in names)

    def _do_hscan(self, key: bytes, *_: bytes) -> Any:
        return [b"0", [part for item in self.data.get(key, {}).items() for part in item]]

    def _do_waitaof(self, *_: bytes) -> Any:
        return [1, 0]

    def _do_hello(self, *_: bytes) -> Any:
        return [b"server", b"redis", b"version", b"7.4.0", b"proto", 2]

    def _do_client(self, *_: bytes) -> Any:
        return True


class Wire:
    """One connection: redis-py's writer on one side, the server's session on the other."""

    def __init__(self, server: Redis, reader: asyncio.StreamReader, client: object) -> None:
        self._server, self._reader, self.client = server, reader, client
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._watched: dict[bytes, int] = {}
        self._queue: list[list[bytes]] | None = None
        self._closed = False
        self._there_at = self._back_at = 0.0  # a stream keeps its order, both ways
        server.connections[self] = None

    def write(self, data: bytes) -> None:
        if self._closed:
            raise ConnectionError("the simulated connection is cut")
        self._there_at = max(self._there_at + TICK, self._loop.time() + self._server.delay())
        self._loop.call_at(self._there_at, self._arrive, bytes(data))

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    async def drain(self) -> None:
        return None

    def close(self) -> None:
        self.cut(deliver=False)

    def is_closing(self) -> bool:
        return self._closed

    async def wait_closed(self) -> None:
        return None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def cut(self, *, deliver: bool) -> None:
        """End it; with `deliver`, what was sent still reaches the server."""
        self._closed, self._lost = True, not deliver
        self._server.connections.pop(self, None)
        if not self._reader.at_eof():
            self._reader.feed_eof()

    _lost = False

    def _arrive(self, data: bytes) -> None:
        if self._lost or not self._server.up:
            return
        self._buffer += data
        while (parsed := _parse(self._buffer)) is not None:
            command, used = parsed
            self._buffer = self._buffer[used:]
            self._answer(_render(self._execute(command)))

    def _answer(self, data: bytes) -> None:
        if not self._closed:
            self._back_at = max(self._back_at + TICK, self._loop.time() + self._server.delay())
            self._loop.call_at(self._back_at, self._feed, data)

    def _feed(self, data: bytes) -> None:
        if not self._closed:
            self._reader.feed_data(data)

    def _execute(self, command: list[bytes]) -> Any:
        name = command[0].upper()
        if name == b"MULTI":
            self._queue = []
            return True
        if name == b"EXEC":
            queue, watched = self._queue or [], self._watched
            self._queue, self._watched = None, {}
            if any(self._server.version_of(key) != version for key, version in watched.items()):
                return None
            self._server.written(self.client, queue)
            return [self._server.do(queued) for queued in queue]
        if self._queue is not None:
            self._queue.append(command)
            return "QUEUED"
        if name == b"WATCH":
            for key in command[1:]:
                self._watched.setdefault(key, self._server.version_of(key))
            return True
        if name == b"UNWATCH":
            self._watched = {}
            return True
        return self._server.do(command)


def _parse(data: bytes) -> tuple[list[bytes], int] | None:
    end = data.find(b"\r\n")
    if end < 0:
        return None
    parts, at = [], end + 2
    for _ in range(int(data[1:end])):
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(data[at + 1 : end])
        if len(data) < end + size + 4:
            return None
        parts.append(data[end + 2 : end + 2 + size])
        at = end + size + 4
    return parts, at


def _render(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if value is True:
        return b"+OK\r\n"
    if isinstance(value, str):
        return b"+" + value.encode() + b"\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(_render, value))
    return b"$%d\r\n%s\r\n" % (len(value), value)
