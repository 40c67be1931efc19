"""Processes, sockets, shared memory and files of a job are found, and only they."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.traces import Process, Traces, is_keeper, kill, role_of, strays
from tests.support.waiting import PATIENCE

SLEEPER = """
import mmap, os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(handle, 4096)
kept = mmap.mmap(handle, 4096)
print("up", flush=True)
time.sleep(600)
"""


@contextmanager
def sleeper(folder: Path, shared: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of the job: only its environment says so."""
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    command = [sys.executable, "-c", SLEEPER, str(shared)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_what_a_job_leaves_is_found(tmp_path: Path) -> None:
    folder, shared = tmp_path / "job", Path("/dev/shm") / f"chaos-test-{os.getpid()}"
    (folder / "tmp").mkdir(parents=True)
    (folder / "run").mkdir()
    traces = Traces(folder)
    try:
        with sleeper(folder, shared) as process:
            (found,) = traces.look()
            assert found.pid == process.pid
            left = "\n".join(traces.left_behind(folder / "run", patience=0.0))
            for trace in (f"process {process.pid}", "port ", f"shared memory {shared}"):
                assert trace in left
            assert kill(found)
            process.wait(PATIENCE)
            assert traces.left_behind(folder / "run") == [f"shared memory {shared} was left"]
    finally:
        shared.unlink()
    (folder / "tmp" / "cosmos-x").mkdir()
    (folder / "tmp" / "torchinductor_me").mkdir()
    left_files = traces.left_behind(folder / "run")
    assert left_files == [f"temporary file {folder / 'tmp' / 'cosmos-x'} was left"]


def test_another_process_of_the_same_number_is_not_killed() -> None:
    mine = Process(os.getpid(), os.getppid(), ("somebody", "else"), None)
    assert not kill(mine)


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (("python", "-P", "-m", "controller", "--run-dir", "x"), "controller"),
        (("python", "-P", "-m", "controller.data.prepare", "--run-dir", "x"), "data"),
        (("python", "-P", "-m", "rollout_worker"), "rollout"),
        (("python", "-P", "-m", "rollout_worker.rewards.process"), "reward"),
        (("python", "-P", "-m", "policy_worker"), "policy"),
        (("/a/valkey-server unixsocket:/tmp/x",), "redis"),
        (("python", "-I", "-S", "/a/launcher/processes/keeper.py", "{}", "python", "-m", "controller"), None),
        (("python", "cosmos-launch", "--config", "x"), None),
    ],
)
def test_roles_are_told_by_arguments(argv: tuple[str, ...], role: str | None) -> None:
    assert role_of(argv) == role
    assert is_keeper(argv) == ("keeper.py" in " ".join(argv))


def test_half_written_files_are_strays(tmp_path: Path) -> None:
    for name in (
        "config.json", ".config.json.12", ".locks/x.lock", ".tokens/user", "data/.train.safetensors.7",
        "checkpoints/step-00000005/.metadata", "checkpoints/.step-00000010.ab/x", "weights/.tmp-1/x",
        "redis/temp-rewriteaof-1.aof", "uploads/a.json.tmp",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert [str(path.relative_to(tmp_path)) for path in strays(tmp_path)] == [
        ".config.json.12",
        "checkpoints/.step-00000010.ab",
        "data/.train.safetensors.7",
        "redis/temp-rewriteaof-1.aof",
        "uploads/a.json.tmp",
        "weights/.tmp-1",
    ]
