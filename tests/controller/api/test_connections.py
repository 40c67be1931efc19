"""Slow, silent and too many clients against real sockets: none of them holds memory or a connection for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from controller.api.connections import MAX_HEAD, PatientProtocol, connection_limit
from controller.api.limits import BodyBudget, BodyLimit
from controller.errors import ApiError
from controller.services.errors import refusal
from tests.controller.conftest import in_event_loop
from tests.support.waiting import PATIENCE

GRACE = PATIENCE / 2
"""Seconds: every limit that a test is not about, and the end of every wait."""
SLOW = 10.0
"""Seconds in which a slow reader takes an answer: twice what a connection may stand still."""
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


class NoBacklog:
    backlog_bytes = 0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body; /large with 64 MB."""
    try:
        body = await Request(scope, receive).body()
        answer = Response(b"x" * 64_000_000 if scope["path"] == "/large" else str(len(body)))
    except ApiError as error:
        answer = refusal(error)
    await answer(scope, receive, send)


class Stage:
    """A server with short time-outs; `port` is where it listens."""

    def __init__(self, limits: BodyLimit, server: uvicorn.Server, port: int) -> None:
        self.limits, self.server, self.port = limits, server, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """Send bytes, and read until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), GRACE)
        writer.close()
        return (int(answer.split(b" ")[1]) if answer else 0), answer


@asynccontextmanager
async def served(**limits: float) -> AsyncIterator[Stage]:
    stall, grace = limits.get("stall", GRACE), limits.get("grace", GRACE)
    store: Any = NoBacklog()
    body = BodyLimit(echo, store, 10_000, 20_000, small=0, stall=stall, grace=grace)
    protocol = PatientProtocol.limited(
        int(limits.get("connections", 100)), limits.get("head", GRACE), limits.get("read", GRACE)
    )
    options = uvicorn.Config(
        body, http=protocol, lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=1, timeout_keep_alive=1,
    )  # fmt: skip
    server = uvicorn.Server(options)
    listener = await asyncio.get_running_loop().create_server(lambda: None, "127.0.0.1", 0)  # type: ignore[arg-type,return-value]
    socket = listener.sockets[0]._sock.dup()  # type: ignore[attr-defined]
    listener.close()
    serving = asyncio.create_task(server._serve([socket]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield Stage(body, server, socket.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - it happens in uvicorn; `in_event_loop` limits the time
        await asyncio.sleep(0.005)


@in_event_loop
async def test_the_end_of_a_refused_body_is_not_taken_for_a_head() -> None:
    """Its rest comes in one piece with the beginning of the next request."""
    async with served() as stage:
        reader, writer = await stage.connect()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n1adb0\r\n" + b"x" * 20_000)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), GRACE)
        assert b" 413 " in head.splitlines()[0]
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(b"x" * 90_000 + b"\r\n0\r\n\r\n" + HEAD)
        await asyncio.sleep(0.05)  # so that it is read without the rest of its head
        writer.write(b"connection: close\r\ncontent-length: 2\r\n\r\nok")
        answer = await asyncio.wait_for(reader.read(), GRACE)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        writer.close()


@pytest.mark.parametrize(
    "start", [b"", b"\r\n", HEAD, b"GET / HTTP/1.1\r\n" * 2, HEAD + b"content-length: 0\r\n\r\n\r\n"]
)
@in_event_loop
async def test_a_head_that_never_ends_is_closed(start: bytes) -> None:
    async with served(head=0.2) as stage:
        await stage.ask(start)  # returns, since the server closes
        assert not stage.server.server_state.connections


@in_event_loop
async def test_a_head_that_is_too_large_is_refused() -> None:
    async with served() as stage:
        status, _ = await stage.ask(HEAD + b"x-a: " + b"a" * (MAX_HEAD + 1))
        assert status == 431
        many = b"".join(b"x-%d: a\r\n" % i for i in range(10_000))
        assert (await stage.ask(HEAD + many))[0] == 431


@in_event_loop
async def test_trailers_are_not_kept() -> None:
    async with served() as stage:
        reader, writer = await stage.connect()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        writer.write(b"".join(b"x-%d: a\r\n" % i for i in range(100)))
        await writer.drain()
        connections = stage.server.server_state.connections
        await until(lambda: any(connection.cycle is not None for connection in connections))
        for _ in range(20):  # turns in which the server, which shares this loop, reads what is there
            await asyncio.sleep(0.005)
        (connection,) = connections
        assert len(connection.headers) == 2
        writer.write(b"\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readline(), GRACE)
        writer.close()


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 10\r\n\r\nabc",
        b"content-length: 99999999\r\n\r\nabc",
        b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
@in_event_loop
async def test_a_body_that_stops_is_given_up(framing: bytes) -> None:
    async with served(stall=0.2) as stage:
        status, _ = await stage.ask(HEAD + framing)
        assert status == 408
        assert stage.limits.budget.used == 0


@pytest.mark.parametrize(
    ("framing", "drop"),
    [
        (b"content-length: 9999\r\n\r\n", b"a"),
        (b"content-length: 99999999\r\n\r\n", b"a"),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    ],
)
@in_event_loop
async def test_a_body_that_drips_ends_after_its_total_time(framing: bytes, drop: bytes) -> None:
    async with served(grace=0.2) as stage:
        reader, writer = await stage.connect()
        writer.write(HEAD + framing)
        answer = asyncio.create_task(reader.readuntil(b"}"))  # then it is reset, by what comes late
        while not answer.done():
            writer.write(drop)
            await asyncio.sleep(0.01)
        assert b" 408 " in answer.result()
        assert b"took longer" in answer.result()
        assert stage.limits.budget.used == 0
        writer.close()


@in_event_loop
async def test_bodies_share_a_budget_and_are_told_to_come_back() -> None:
    async with served() as stage:
        _, slow = await stage.connect()
        slow.write(HEAD + b"content-length: 9000\r\n\r\n" + b"x" * 8999)
        await until(lambda: stage.limits.budget.used == 8999)
        close = b"connection: close\r\n"
        status, answer = await stage.ask(HEAD + close + b"content-length: 9000\r\n\r\n" + b"x" * 9000)
        assert status == 503
        assert b"retry-after: 1" in answer
        chunk = b"1388\r\n" + b"x" * 5000 + b"\r\n"
        chunked = HEAD + close + b"transfer-encoding: chunked\r\n\r\n"
        assert (await stage.ask(chunked + chunk + b"0\r\n\r\n"))[0] == 200
        assert (await stage.ask(chunked + chunk + chunk[:-2] + b"\r\n0\r\n\r\n"))[0] == 503
        assert (await stage.ask(chunked + 3 * chunk + b"0\r\n\r\n"))[0] in (413, 503)
        assert stage.limits.budget.used == 8999
        slow.close()
        await until(lambda: not stage.limits.budget.used)
        assert (await stage.ask(HEAD + close + b"content-length: 9000\r\n\r\n" + b"x" * 9000))[0] == 200


@in_event_loop
async def test_one_connection_too_many_is_told_to_come_back() -> None:
    async with served(connections=3) as stage:
        held = [await stage.connect() for _ in range(3)]
        await until(lambda: len(stage.server.server_state.connections) == 3)
        status, answer = await stage.ask(b"")
        assert status == 503
        assert b"retry-after: 1" in answer
        held[0][1].close()
        await until(lambda: len(stage.server.server_state.connections) == 2)
        get = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert (await stage.ask(get))[0] == 200
        for _, writer in held[1:]:
            writer.close()


@pytest.mark.slow
@in_event_loop
async def test_an_answer_that_nobody_reads_is_dropped_and_a_slow_reader_gets_it() -> None:
    get = b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with served(read=0.5) as stage:
        _, writer = await stage.connect()
        writer.write(get)
        await until(lambda: bool(stage.server.server_state.connections))
        await until(lambda: not stage.server.server_state.connections)
        writer.close()
    async with served(read=SLOW / 2) as stage:
        reader, writer = await stage.connect()
        writer.write(get)
        read = 0
        while part := await asyncio.wait_for(reader.read(1_000_000), GRACE):
            read += len(part)
            await asyncio.sleep(SLOW / 512)  # a part is 128 kB at most
        assert read > 64_000_000
        writer.close()


@given(limit=st.integers(1, 20), parts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=60))
def test_a_budget_holds_its_limit_or_one_body_and_never_stops_all(limit: int, parts: list[tuple[int, int]]) -> None:
    """Five bodies: a part of 0 bytes ends one, as does a refusal."""
    budget, charged = BodyBudget(limit), [0] * 5
    for body, n in parts:
        others = sum(charged) - charged[body]
        taken = n > 0 and budget.take(n, charged[body])
        if taken:
            charged[body] += n
        else:
            assert not n or (others and others + charged[body] + n > limit)
            budget.give(charged[body])
            charged[body] = 0
        assert budget.used == sum(charged)
        assert budget.used <= limit or max(charged) == sum(charged)


def test_the_limit_of_connections_leaves_descriptors_for_the_rest() -> None:
    assert 16 <= connection_limit() <= 8192
