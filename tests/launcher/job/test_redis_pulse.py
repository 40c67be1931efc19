"""Whether Redis answers: the decision over plain values, and the looks at real servers."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import redis

from launcher.job import redis_pulse
from launcher.job.redis_pulse import HUNG_AFTER, RESTART_AFTER, Answer, Pulse, RedisPulse, State, _look, _opener
from launcher.plan.redis_server import RedisServer
from tests.support.certificates import make_certificates
from tests.support.tls_proxy import tls_proxy
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE, until

A, R, S = "answer", "refused", "silence"


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("answers", "state", "restarts"),
    [
        ([], "ok", 0),
        ([A, A], "ok", 0),
        ([S] * (HUNG_AFTER - 1), "ok", 0),
        ([S] * HUNG_AFTER, "hung", 0),
        ([S] * (HUNG_AFTER - 1) + [A, S], "ok", 0),
        ([S] * HUNG_AFTER + [A], "ok", 0),
        ([S] * HUNG_AFTER + [R], "away", 0),
        ([R, S], "away", 0),
        ([R, A], "ok", 0),
        ([S] * (RESTART_AFTER - 1), "hung", 0),
        ([S] * (RESTART_AFTER - 1) + [A] + [S] * (RESTART_AFTER - 1), "hung", 0),
        ([R] * (RESTART_AFTER - 1) + [A, R], "away", 0),
        ([R] * RESTART_AFTER, "away", 1),
        ([S] * (RESTART_AFTER - 1) + [R, S], "away", 1),
        ([S] * RESTART_AFTER, "hung", 1),
        ([S] * RESTART_AFTER + [R, A], "ok", 1),
        ([S] * (2 * RESTART_AFTER - 1), "hung", 1),
        ([S] * 2 * RESTART_AFTER, "hung", 2),
    ],
)
def test_what_the_answers_say(answers: list[Answer], state: State, restarts: int, own: bool) -> None:
    pulse = Pulse(restarts=own)
    assert sum([pulse.take(answer) for answer in answers]) == (restarts if own else 0)
    assert pulse.state == state


def looks(server: RedisServer) -> str:
    return asyncio.run(_look(_opener(server.url)))


def test_a_real_server_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = make_certificates(tmp_path / "tls")
    with running_valkey(password="secret") as valkey:
        plain = RedisServer(valkey.url, "secret")
        with tls_proxy(valkey.url, certificates.server_context()) as port:
            named = RedisServer(f"rediss://localhost:{port}?ssl_ca_certs={certificates.ca}")
            assert [looks(plain), looks(named)] == [A, A], "it wants a password, so it is there"
            monkeypatch.setattr(redis_pulse, "LOOK_EVERY", 0.5)
            valkey.send_signal(signal.SIGSTOP)
            assert [looks(plain), looks(named)] == [S, S]
            valkey.send_signal(signal.SIGCONT)
            monkeypatch.setattr(redis_pulse, "LOOK_EVERY", PATIENCE)
            assert [looks(plain), looks(named)] == [A, A]
            valkey.stop()
            assert looks(plain) == R


def test_what_this_process_lacks_says_nothing_of_the_server() -> None:
    async def no_descriptors() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    assert asyncio.run(_look(no_descriptors)) is None


def test_an_answer_without_an_end_is_one(tmp_path: Path) -> None:
    """Whatever listens there, and however long its line: the watch goes on."""

    async def main() -> None:
        async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"x" * 2**20)
            await asyncio.sleep(PATIENCE)

        async with await asyncio.start_unix_server(endless, tmp_path / "socket"):
            assert await _look(_opener(f"unix://{tmp_path / 'socket'}")) == A

    asyncio.run(main())


def test_a_full_queue_is_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_pulse, "LOOK_EVERY", 0.2)
    with running_valkey("--tcp-backlog", "1") as valkey:
        valkey.send_signal(signal.SIGSTOP)
        path = valkey.url.removeprefix("unix://")
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        try:
            with pytest.raises(BlockingIOError):  # noqa: PT012 - the one that no longer fits
                for one in waiting:
                    one.setblocking(False)
                    one.connect(path)
            assert looks(RedisServer(valkey.url)) == S
        finally:
            for one in waiting:
                one.close()


def test_one_that_reads_its_file_is_not_hung(tmp_path: Path) -> None:
    def answers(client: redis.Redis) -> str:
        try:
            return str(client.ping())
        except redis.RedisError as error:
            return type(error).__name__

    with running_valkey() as valkey, valkey.client() as client:
        with client.pipeline(transaction=False) as pipeline:
            for i in range(1000):
                pipeline.set(f"key{i}", "x" * 1000)
            pipeline.execute()
        client.bgrewriteaof()  # while it reads an RDB it looks at its connections after so many bytes
        until(lambda: not client.info("persistence")["aof_rewrite_in_progress"], "a shorter file")
        valkey.stop()
        slow = ("--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
        valkey.start(*slow, wait=False)
        until(lambda: answers(client) == "BusyLoadingError", "a server that loads")
        assert looks(RedisServer(valkey.url)) == A


def test_a_named_server_that_hangs_is_reported_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(redis_pulse, "LOOK_EVERY", 0.5)  # two looks in a row that take longer are "hung"
    monkeypatch.setattr(redis_pulse, "RESTART_AFTER", 4)

    async def main(valkey: ValkeyServer) -> None:
        pulse = RedisPulse(RedisServer(valkey.url), lambda: said.append("restarted"), said.append)
        looking = asyncio.create_task(pulse.look_forever())

        async def comes(what: str) -> None:
            async with asyncio.timeout(PATIENCE):
                while not (said and what in said[-1]):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)

        valkey.send_signal(signal.SIGSTOP)
        await comes("redis=hung")
        assert pulse.trouble == "hung"
        await asyncio.sleep(redis_pulse.LOOK_EVERY * 2 * redis_pulse.RESTART_AFTER)
        valkey.send_signal(signal.SIGCONT)
        await comes("answers again")
        valkey.stop()
        await comes("redis=away")
        looking.cancel()

    with running_valkey() as valkey:
        asyncio.run(main(valkey))
    assert [text.partition(":")[0] for text in said] == ["redis=hung", "redis answers again", "redis=away"]
