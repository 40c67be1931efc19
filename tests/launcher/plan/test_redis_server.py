"""The embedded Valkey and named servers, with real servers on unix sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from launcher.plan.redis_server import (
    RedisServer,
    RedisUnusableError,
    check,
    embedded,
    named,
    valkey_binary,
    wait_ready,
)
from schema.config import RedisConfig
from schema.util.host import MAX_SOCKET_PATH
from tests.support.waiting import PATIENCE, until


@contextmanager
def running(data_dir: Path, *extra: str) -> Iterator[RedisServer]:
    """An embedded server as the supervisor would start it."""
    server = embedded(data_dir)
    assert server.replica is not None
    with (data_dir / "log").open("ab") as log:
        process = subprocess.Popen([*server.replica.processes[0].argv, *extra], stdout=log, stderr=log)
    try:
        assert asyncio.run(wait_ready(server.url, PATIENCE)), (data_dir / "log").read_text()
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(server.directory)


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def test_the_embedded_server_is_private_durable_and_comes_back(tmp_path: Path):
    with running(tmp_path) as server:
        path = Path(server.url.removeprefix("unix://"))
        assert len(os.fsencode(path)) <= MAX_SOCKET_PATH
        assert stat.S_IMODE(Path(server.directory).stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with client(server) as connection:
            settings = connection.config_get("*")
            assert settings["port"] == "0"
            assert settings["appendonly"] == "yes"
            assert settings["appendfsync"] == "everysec"
            assert settings["maxmemory-policy"] == "noeviction"
            connection.set("ledger", "kept")
        assert check(server, require_durable=True) == []
    assert any((tmp_path / "appendonlydir").iterdir())
    with running(tmp_path) as server, client(server) as connection:
        assert connection.get("ledger") == b"kept"


def test_a_deep_run_directory_does_not_matter(tmp_path: Path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with running(deep) as server, client(server) as connection:
        assert connection.ping()


def test_a_deep_temporary_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("t" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    server = embedded(tmp_path)
    assert len(server.url.removeprefix("unix://")) <= MAX_SOCKET_PATH
    shutil.rmtree(server.directory)


def test_what_a_killed_start_has_left_is_removed_by_the_next(tmp_path: Path):
    left = Path(embedded(tmp_path).directory)
    (left / "redis.sock").touch()
    server = embedded(tmp_path)
    assert not left.exists()
    (Path(server.directory) / "of somebody").touch()
    again = embedded(tmp_path)
    assert Path(server.directory).exists(), "what is not a socket is not ours to remove"
    for directory in (server.directory, again.directory):
        shutil.rmtree(directory)


def test_waiting_for_a_server_ends():
    assert not asyncio.run(wait_ready("unix:///no/such.sock", 0.1))


def test_the_binary_is_found_without_importing_its_package():
    binary = valkey_binary()
    assert binary is not None
    assert os.access(binary, os.X_OK)


def test_a_named_server_takes_its_password_from_the_environment():
    config = RedisConfig(url="redis://host:1")
    assert named(config, {"COSMOS_REDIS_PASSWORD": "p"}) == RedisServer("redis://host:1", "p")
    assert named(RedisConfig(), {}) is None


def test_an_unreachable_server_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launcher.plan.redis_server.CONNECT_TIMEOUT", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # kept, so that nobody else listens there meanwhile
        with pytest.raises(RedisUnusableError, match=f"redis://127.0.0.1:{port} cannot be reached"):
            check(RedisServer(f"redis://:secret@127.0.0.1:{port}"), False)


def test_a_server_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launcher.plan.redis_server.CONNECT_TIMEOUT", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(RedisUnusableError, match="cannot be reached"):  # a hang is a time-out here
        check(RedisServer(f"redis://127.0.0.1:{listener.getsockname()[1]}"), False)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(path) == 0


def test_a_wrong_password_is_told_apart(tmp_path: Path):
    server = embedded(tmp_path)
    assert server.replica is not None
    argv = [*server.replica.processes[0].argv, "--requirepass", "right"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        path = server.url.removeprefix("unix://")
        until(lambda: _listens(path), "the server")
        for password in ("", "wrong"):
            with pytest.raises(RedisUnusableError, match="refuses the password") as caught:
                check(RedisServer(server.url, password), False)
            assert "COSMOS_REDIS_PASSWORD" in caught.value.hint
        assert check(RedisServer(server.url, "right"), False) == []
        assert check(RedisServer(f"unix://:right@{path}"), False) == []
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(server.directory)


def test_a_server_that_forgets_is_a_warning_or_an_error(tmp_path: Path):
    with running(tmp_path, "--appendonly", "no", "--maxmemory-policy", "allkeys-lru") as server:
        warnings = check(server, require_durable=False)
        assert len(warnings) == 2
        assert "append-only" in warnings[0]
        assert "allkeys-lru" in warnings[1]
        with pytest.raises(RedisUnusableError, match="append-only"):
            check(server, require_durable=True)
