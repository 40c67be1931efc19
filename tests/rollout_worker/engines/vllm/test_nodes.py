"""Machines of one engine: who is taken in, who hears of whose end, and that their ranks are one engine."""

from __future__ import annotations

import contextlib
import json
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
from rollout_worker.engines.vllm.nodes import (
    MOST_UNPROVEN,
    PURPOSE,
    LeadingNode,
    Members,
    NodeError,
    Nodes,
    differences,
    join,
    nodes_of,
)
from schema.util.proof_exchange import MAC_BYTES, OPENING_BYTES, ClientProof, ServerProof
from schema.util.threads import in_daemon
from tests.rollout_worker.engines.engine_contract import BOOT_S, Subject, check_logprobs, request
from tests.rollout_worker.engines.vllm.test_engine import settings_of, subject_of
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
    return Nodes(3, 0, HOST, free_ports(), tmp_path / "engine", secrets.token_urlsafe(16))


@contextmanager
def gathered(nodes: Nodes) -> Iterator[tuple[Members, list[LeadingNode], threading.Event]]:
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
    with contextlib.ExitStack() as stack:
        for n in range(2 * MOST_UNPROVEN):  # which say nothing, or half an opening
            silent = stack.enter_context(socket.create_connection((HOST, nodes.port), PATIENCE))
            silent.sendall(ClientProof(PURPOSE, "another").opening[: n % OPENING_BYTES])
        for other, words in (
            (replace(nodes, index=1, token="another"), "does not know the token"),
            (replace(nodes, index=3), "node 3 is not one of the 3 machines of this engine"),
        ):
            with pytest.raises(NodeError, match=words):
                join(other)
        assert len(members._coming) <= MOST_UNPROVEN
        stranger = stack.enter_context(socket.create_connection((HOST, nodes.port), PATIENCE))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(OPENING_BYTES))
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    assert not members._there
    stop.set()
    with pytest.raises(NodeError, match="closed while it was starting"):
        gathering.result(PATIENCE)
    members.end()


def test_an_impostor_and_what_is_on_the_way_make_a_machine_run_nothing(nodes: Nodes) -> None:
    """The impostor answers under another token; what is on the way adds a message to a genuine conversation."""
    own = replace(nodes, index=1)
    told = json.dumps({"config": CONFIG, "leader": HOST, "port": 1}).encode()
    forged = len(told).to_bytes(4, "little") + bytes(MAC_BYTES) + told
    for token, words in (("another", "does not know the token"), (nodes.token, "has a wrong MAC")):
        with socket.create_server((HOST, nodes.port)) as listener:
            joining: Future[LeadingNode] = in_daemon(lambda: join(own), "join")
            connection, _ = listener.accept()
            with connection:
                opening = connection.recv(OPENING_BYTES, socket.MSG_WAITALL)
                connection.sendall(ServerProof(PURPOSE, token, opening).answer + forged)
                with pytest.raises(NodeError, match=words):
                    joining.result(PATIENCE)
                with suppress(ConnectionResetError):
                    assert (connection.recv(1, socket.MSG_WAITALL) == b"") == (token == "another")


def test_a_machine_runs_what_its_own_configuration_says(nodes: Nodes, tmp_path: Path) -> None:
    """Node 0 wants it to import a module of its choice; the follower has another configuration, and refuses."""
    config = settings_of(tmp_path, random_model(1), {"parallelism": {"tp_size": 2}})
    assert differences(config, json.loads(json.dumps(config.to_dict()))) == []
    wanted = config.to_dict()
    wanted["policy"]["external_modules"] = ["stranger"]
    wanted["train"]["seed"] = 99
    assert differences(config, wanted) == ["policy.external_modules"]
    assert differences(config, {}) != []
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    env = {
        "COSMOS_ENGINE_NODES": "2", "COSMOS_ENGINE_NODE": "1", "COSMOS_ENGINE_LEADER": HOST,
        "COSMOS_ENGINE_PORT": str(nodes.port), "COSMOS_ENGINE_FOLDER": str(tmp_path), "COSMOS_TOKEN": nodes.token,
        "COSMOS_ENGINE_CONFIG": str(file),
    }  # fmt: skip
    lost = threading.Event()
    members = Members(replace(nodes, count=2), lost.set)
    with follower(env, tmp_path / "log") as process:
        members.gather(wanted, threading.Event())
        assert process.wait(PATIENCE) == 2
        assert lost.wait(PATIENCE)
    assert "policy.external_modules" in members.lost
    members.end()


def test_a_machine_is_found_by_its_environment(tmp_path: Path) -> None:
    env = {"COSMOS_ENGINE_NODES": "2", "COSMOS_ENGINE_NODE": "1", "COSMOS_ENGINE_LEADER": "a", "COSMOS_TOKEN": "t"}
    whole = env | {"COSMOS_ENGINE_FOLDER": str(tmp_path), "COSMOS_ENGINE_CONFIG": "/c"}
    assert nodes_of({}) is None
    assert nodes_of(whole) == Nodes(2, 1, "a", 29400, tmp_path, "t", Path("/c"))
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
    log, file = tmp_path / "follower.log", tmp_path / "config.json"
    rollout = {"parallelism": mesh, "load_format": "dummy"}
    file.write_text(settings_of(tmp_path, random_model(1), rollout).model_dump_json())
    with follower(env | {"COSMOS_ENGINE_NODE": "1", "COSMOS_ENGINE_CONFIG": str(file)}, log) as process:
        in_daemon(lambda: meanwhile(process, log), "meanwhile")
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
@pytest.mark.parametrize(("of_ranks", "words"), [(False, "the other side hung up"), (True, "vLLM's ranks have died")])
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
        until(lambda: any("VLLM" in one.name() for one in psutil.Process(process.pid).children()), "ranks", BOOT_S)
        process.kill()

    dies = pytest.raises(EngineFailed, match="node 1 of the engine is gone: the other side hung up")
    with dies, engine_of_two(tmp_path, monkeypatch, {"tp_size": 2}, kill_when_it_starts):
        raise AssertionError("it has started")
