from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from policy_worker.errors import SettingsError
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest, set_up_torch
from schema.util.gpus import variable_for
from tests.support.waiting import PATIENCE

NAMES = ("COSMOS_CONTROLLER_URL", "COSMOS_TOKEN", "COSMOS_REPLICA_NAME", "COSMOS_CPU_THREADS", "COSMOS_PARENT_PID")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*NAMES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_environment(environ: pytest.MonkeyPatch):
    environ.setenv("COSMOS_CONTROLLER_URL", "http://c:1")
    environ.setenv("COSMOS_TOKEN", "t")
    plain = Environment.of_environ()
    assert (plain.url, plain.token, plain.threads, plain.parent) == ("http://c:1", "t", None, None)
    assert plain.name.startswith("policy-")
    environ.setenv("COSMOS_REPLICA_NAME", "p7")
    environ.setenv("COSMOS_CPU_THREADS", "3")
    environ.setenv("COSMOS_PARENT_PID", "42")
    full = Environment.of_environ()
    assert (full.name, full.threads, full.parent) == ("p7", 3, 42)
    environ.setenv("COSMOS_CPU_THREADS", "0")
    with pytest.raises(SettingsError, match="COSMOS_CPU_THREADS = '0'"):
        Environment.of_environ()


def test_rank_environment(environ: pytest.MonkeyPatch):
    assert RankEnvironment.of_environ() == RankEnvironment(0, 1, 0)
    environ.setenv("WORLD_SIZE", "4")
    environ.setenv("RANK", "3")
    with pytest.raises(SettingsError, match="needs MASTER_ADDR and MASTER_PORT"):
        RankEnvironment.of_environ()
    environ.setenv("MASTER_ADDR", "127.0.0.1")
    environ.setenv("MASTER_PORT", "1")
    environ.setenv("LOCAL_RANK", "1")
    assert RankEnvironment.of_environ() == RankEnvironment(3, 4, 1, 4)
    environ.setenv("LOCAL_WORLD_SIZE", "2")
    assert RankEnvironment.of_environ() == RankEnvironment(3, 4, 1, 2)
    environ.setenv("LOCAL_RANK", "2")
    with pytest.raises(SettingsError, match="LOCAL_RANK = 2 of LOCAL_WORLD_SIZE = 2 contradict"):
        RankEnvironment.of_environ()
    environ.setenv("LOCAL_RANK", "1")
    environ.setenv("RANK", "4")
    with pytest.raises(SettingsError, match="RANK = 4 of WORLD_SIZE = 4"):
        RankEnvironment.of_environ()
    environ.setenv("RANK", "one")
    with pytest.raises(SettingsError, match="whole numbers"):
        RankEnvironment.of_environ()


def test_only_the_first_reason_counts():
    shutdown = ShutdownRequest()
    assert not shutdown
    shutdown.request("first")
    shutdown.request("second")
    assert shutdown
    assert shutdown.reason == "first"
    assert shutdown.wait(0.0)


def test_a_request_wakes_who_waits():
    shutdown = ShutdownRequest()
    woken = threading.Event()
    thread = threading.Thread(target=lambda: shutdown.wait(PATIENCE) and woken.set())
    thread.start()
    shutdown.request("now")
    thread.join(PATIENCE)
    assert woken.is_set()


PROGRAM = """
import os, sys, threading, time
from policy_worker.process import ShutdownRequest, enforce, install_signals, watch_parent
shutdown = ShutdownRequest(grace=0.2)
install_signals(shutdown)
if sys.argv[1] == "stuck":
    enforce(shutdown)
if sys.argv[1] == "orphan":
    watch_parent(int(sys.argv[2]), shutdown)
print("ready", flush=True)
give_up = time.monotonic() + 300
while time.monotonic() < give_up and (sys.argv[1] == "stuck" or not shutdown):
    time.sleep(0.02)
print(shutdown.reason, flush=True)
"""


def run(*arguments: str, number: signal.Signals | None = None) -> tuple[int, str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if number is not None:
        process.send_signal(number)
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_to_leave(number: signal.Signals):
    assert run("wait", number=number) == (0, f"signal {number.name}\n")


def test_who_does_not_leave_is_ended():
    assert run("stuck", number=signal.SIGTERM) == (1, "")


def test_the_death_of_the_parent_asks_to_leave():
    no_parent = os.getpid() + 1_000_000  # anything but the real one: as if that had ended
    assert run("orphan", str(no_parent)) == (0, "the process that started this one has ended\n")


@pytest.mark.parametrize(
    ("cores", "ranks_here", "threads"), [(96, 8, "12"), (256, 1, "32"), (2, 1, "2"), (4, 8, "1")]
)
def test_ranks_of_one_machine_share_its_cores_to_compile(cores: int, ranks_here: int, threads: str):
    environment: dict[str, str] = {}
    set_up_torch(ranks_here, cores, environment)
    assert environment == {"TORCHINDUCTOR_COMPILE_THREADS": threads}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_sets_of_pytorch_stays(name: str):
    on_gpu, chosen = variable_for(1), {"TORCHINDUCTOR_COMPILE_THREADS": "3", name: "max_split_size_mb:64"}
    set_up_torch(1, 8, environment := dict(on_gpu))
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    set_up_torch(1, 8, environment := on_gpu | chosen)
    assert environment == on_gpu | chosen
