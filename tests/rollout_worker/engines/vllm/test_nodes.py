"""Machines of one engine: who is taken in, who hears of whose end, and that their ranks are one engine."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rollout_worker.engines.base import EngineConfigError, EngineFailed, SamplingSettings
from rollout_worker.engines.vllm.nodes import Leader, Members, NodeError, Nodes, join, nodes_of
from schema.util.threads import in_daemon
from tests.rollout_worker.engines.engine_contract import BOOT_S, Subject, check_logprobs, request
from tests.rollout_worker.engines.vllm.test_engine import subject_of
from tests.rollout_worker.tiny import random_model
from tests.rollout_worker.versions import Versions, nudged
from tests.support.waiting import PATIENCE, until

CONFIG = {"policy": {"model_name_or_path": "x" * 100_000}}
HOST = "127.0.0.1"


def free_ports() -> int:
    """The first of two neighbours that nobody has."""
    for _ in range(100):
        with socket.create_server((HOST, 0)) as one:
            port = int(one.getsockname()[1])
            try:
                with socket.create_server((HOST, port + 1)):
                    return port
            except (OSError, OverflowError):
                continue
    raise AssertionError("no two neighbouring ports are free")


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(3, 0, HOST, free_ports(), tmp_path / "engine", secrets.token_bytes(16))


@contextmanager
def gathered(nodes: Nodes) -> Iterator[tuple[Members, list[Leader], threading.Event]]:
    lost, stop = threading.Event(), threading.Event()
    members = Members(nodes, lost.set)
    try:
        joining = [in_daemon(lambda n=n: join(replace(nodes, index=n)), "join") for n in (1, 2)]
        members.gather(CONFIG, stop)
        yield members, [one.result(PATIENCE) for one in joining], lost
    finally:
        members.end()


def test_all_hear_what_to_run_and_that_it_is_over(nodes: Nodes) -> None:
    with gathered(nodes) as (members, leaders, lost):
        assert [one.config for one in leaders] == [CONFIG, CONFIG]
        assert [one.nodes for one in leaders] == [replace(nodes, index=1), replace(nodes, index=2)]
        waiting: list[Future[None]] = [in_daemon(one.wait, "wait") for one in leaders]
        assert not members.lost
    for one in waiting:
        one.result(PATIENCE)
    assert not lost.is_set()
    assert not members.lost


def test_the_end_of_one_is_heard_of_with_its_reason(nodes: Nodes) -> None:
    with gathered(nodes) as (members, leaders, lost):
        leaders[1].tell_failure("its GPU fell off the bus")
        assert lost.wait(PATIENCE)
        assert "node 2 of the engine is gone: the other side says: its GPU fell off the bus" in members.lost
        members._there[1].close()  # as the death of this process would
        with pytest.raises(NodeError, match="node 0 of the engine is gone: the other side hung up"):
            leaders[0].wait()


def test_strangers_are_not_taken_in(nodes: Nodes) -> None:
    stop = threading.Event()
    members = Members(nodes, lambda: None)
    gathering = in_daemon(lambda: members.gather(CONFIG, stop), "gather")
    for other in (replace(nodes, index=1, token=b"another"), replace(nodes, index=3)):
        with pytest.raises(NodeError, match="of this engine, or with another token"):
            join(other)
    with socket.create_connection((HOST, nodes.port), PATIENCE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    stop.set()
    with pytest.raises(NodeError, match="closed while it was starting"):
        gathering.result(PATIENCE)
    members.end()


def test_a_machine_is_found_by_its_environment(tmp_path: Path) -> None:
    env = {
        "COSMOS_ENGINE_NODES": "2",
        "COSMOS_ENGINE_NODE": "1",
        "COSMOS_ENGINE_LEADER": "a",
        "COSMOS_TOKEN": "t",
    }
    whole = env | {"COSMOS_ENGINE_FOLDER": str(tmp_path)}
    assert nodes_of({}) is None
    assert nodes_of(whole) == Nodes(2, 1, "a", 29400, tmp_path, b"t")
    for spoiled, words in (
        (env, "COSMOS_ENGINE_FOLDER is not"),
        (whole | {"COSMOS_ENGINE_NODE": "2"}, "COSMOS_ENGINE_NODE = 2 is not one of 2 machines"),
        (whole | {"COSMOS_ENGINE_NODE": "x"}, "numbers"),
    ):
        with pytest.raises(EngineConfigError, match=words):
            nodes_of(spoiled)


def test_the_folder_of_a_dead_one_is_made_anew(nodes: Nodes) -> None:
    (nodes.folder / "cosmos-weights-0" / "copy").mkdir(parents=True)
    (nodes.folder / "mine").touch()
    with nodes.own_folder():
        assert [path.name for path in nodes.folder.iterdir()] == ["mine"]
    (nodes.folder / "mine").unlink()
    with nodes.own_folder():
        (nodes.folder / "cosmos-served-x").mkdir()
    assert not nodes.folder.exists()


# ---- with vLLM -----------------------------------------------------------------------------------------------


@contextmanager
def follower(env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-P", "-m", "rollout_worker.engines.vllm.follower"]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env={**os.environ, **env}, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


@contextmanager
def engine_of_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mesh: dict[str, int],
    meanwhile: Callable[[subprocess.Popen[bytes], Path], None] = lambda process, log: None,
) -> Iterator[tuple[Subject, subprocess.Popen[bytes], Path]]:
    """An engine of this process and a follower; the follower's log. meanwhile: runs while both start."""
    env = {
        "COSMOS_ENGINE_NODES": "2",
        "COSMOS_ENGINE_NODE": "0",
        "COSMOS_ENGINE_LEADER": HOST,
        "COSMOS_ENGINE_PORT": str(free_ports()),
        "COSMOS_ENGINE_FOLDER": str(tmp_path / "engine"),
        "COSMOS_TOKEN": "token",
        "VLLM_HOST_IP": HOST,
        "PYTHONPATH": os.getcwd(),
    }
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    (tmp_path / "engine").mkdir()
    log = tmp_path / "follower.log"
    with follower(env | {"COSMOS_ENGINE_NODE": "1"}, log) as process:
        in_daemon(lambda: meanwhile(process, log), "meanwhile")
        rollout = {"parallelism": mesh, "load_format": "dummy"}
        with subject_of(tmp_path, [random_model(1)], rollout, loaded=False) as subject:
            yield subject, process, log
        process.wait(PATIENCE)


WANTED = SamplingSettings(max_tokens=12, ignore_eos=True)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [{"tp_size": 2}, {"tp_size": 1, "pp_size": 2}], ids=["tensor", "pipeline"])
def test_ranks_on_two_machines_are_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int]
) -> None:
    model, versions = random_model(2), Versions(tmp_path / "versions", "merged")
    with engine_of_two(tmp_path, monkeypatch, mesh) as (subject, process, log):
        subject.models = [model]
        modes = []
        for version in (4, 5, 6):
            nudged(model, version)
            publication = versions.publish(model, version)
            report = subject.follow(versions, publication)
            modes.append((report.mode, report.detail))
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.problems) == (publication.content_hash, [])
            wanted = request([1, 2, 3], WANTED)
            check_logprobs(model, wanted, subject.one(wanted))
        assert modes == [("full", ""), ("in_place", ""), ("in_place", "")]
        subject.load(0, 7)
        process.send_signal(signal.SIGTERM)
        subject.one(request([1, 2, 3], WANTED))
        assert process.poll() is None, log.read_text()
    assert (process.returncode, list((tmp_path / "engine").iterdir())) == (0, []), log.read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("of_ranks", "words"), [(False, "the other side hung up"), (True, "vLLM's ranks have died")]
)
def test_the_death_of_a_machine_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_ranks: bool, words: str
) -> None:
    with engine_of_two(tmp_path, monkeypatch, {"tp_size": 2}) as (subject, process, _):
        subject.load(0, 0)
        ranks = [one for one in psutil.Process(process.pid).children() if one.name().startswith("VLLM")]
        began = time.monotonic()
        ranks[0].kill() if of_ranks else process.kill()
        with pytest.raises(EngineFailed, match=f"node 1 of the engine is gone: .*{words}"):
            subject.one(request([1, 2, 3], WANTED))
        assert time.monotonic() - began < PATIENCE


@pytest.mark.soak
def test_a_machine_that_dies_at_the_start_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_when_it_starts(process: subprocess.Popen[bytes], log: Path) -> None:
        until(
            lambda: any("VLLM" in one.name() for one in psutil.Process(process.pid).children()),
            "ranks",
            BOOT_S,
        )
        process.kill()

    dies = pytest.raises(EngineFailed, match="node 1 of the engine is gone: the other side hung up")
    with dies, engine_of_two(tmp_path, monkeypatch, {"tp_size": 2}, kill_when_it_starts):
        raise AssertionError("it has started")
