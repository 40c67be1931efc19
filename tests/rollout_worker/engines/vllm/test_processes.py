"""What vLLM's processes find in their environment, and that they follow the worker into its end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rollout_worker.engines import create_engine
from rollout_worker.engines.base import EngineConfigError, EngineFailed
from rollout_worker.engines.vllm import adapter as vllm_adapter
from rollout_worker.engines.vllm.adapter import VllmAdapter
from rollout_worker.engines.vllm.processes import MODULES, PARENT, boot_environment, environment, follow_parent
from rollout_worker.engines.vllm.scratch import Scratch
from schema.config import Config
from schema.util import host
from tests.support.waiting import PATIENCE


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_TEST_KEPT", "before")
    monkeypatch.setenv("COSMOS_TEST_GONE", "before")
    monkeypatch.delenv("COSMOS_TEST_NEW", raising=False)
    outside = dict(os.environ)
    with environment({"COSMOS_TEST_KEPT": "inside", "COSMOS_TEST_GONE": None, "COSMOS_TEST_NEW": "inside"}):
        assert os.environ["COSMOS_TEST_KEPT"] == os.environ["COSMOS_TEST_NEW"] == "inside"
        assert "COSMOS_TEST_GONE" not in os.environ
        os.environ["COSMOS_TEST_SET_BY_OTHERS"] = "1"
    assert dict(os.environ) == outside


def test_put_back_after_an_error() -> None:
    outside = dict(os.environ)
    with pytest.raises(RuntimeError), environment({"COSMOS_TEST_NEW": "1"}):
        raise RuntimeError
    assert dict(os.environ) == outside


def test_modules_to_import_are_named_for_the_engine() -> None:
    assert boot_environment(1)[MODULES] is None
    assert boot_environment(1, ["a.b", "c"])[MODULES] == "a.b,c"


def test_secrets_do_not_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_TOKEN", "secret")
    monkeypatch.setenv("COSMOS_CONTROLLER_URL", "http://127.0.0.1:1")
    with environment(boot_environment(os.getpid())):
        assert "COSMOS_TOKEN" not in os.environ
        assert "COSMOS_CONTROLLER_URL" not in os.environ
        assert os.environ[PARENT] == str(os.getpid())
    assert os.environ["COSMOS_TOKEN"] == "secret"


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND"])
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name, raising=False)
    ours = boot_environment(1)[name]
    monkeypatch.setenv(name, "theirs")
    assert boot_environment(1)[name] == "theirs" != ours


CHILD = """
import os, time
from rollout_worker.engines.vllm.processes import follow_parent
follow_parent()
print(os.getpid(), flush=True)
time.sleep(3600)
"""

PARENT_PROGRAM = """
import os, subprocess, sys, time
environment = {**os.environ, "COSMOS_VLLM_PARENT": str(os.getpid())}
middle = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
subprocess.Popen([sys.executable, "-c", middle, sys.argv[1]], env=environment)
time.sleep(3600)
"""


def test_a_process_ends_when_the_worker_is_killed() -> None:
    """A grandchild, whose own parent lives on: as vLLM's workers below its engine process."""
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT_PROGRAM), CHILD], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    child = psutil.Process(int(program.stdout.readline()))
    try:
        assert child.is_running()
        program.send_signal(signal.SIGKILL)
        program.wait(PATIENCE)
        child.wait(PATIENCE)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
        program.stdout.close()


def test_a_process_whose_worker_is_gone_already_does_not_start() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(PATIENCE)
    child = [sys.executable, "-c", CHILD]
    done = subprocess.run(child, env={**os.environ, PARENT: str(gone.pid)}, timeout=PATIENCE, check=False)
    assert done.returncode == 1


@pytest.mark.parametrize("value", ["", "0", str(os.getpid())], ids=["unset", "zero", "itself"])
def test_nothing_is_followed_elsewhere(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """vLLM started by somebody else loads the plugin too, and must not be ended by it."""
    monkeypatch.delenv(PARENT, raising=False)
    if value:
        monkeypatch.setenv(PARENT, value)
    before = threading.active_count()
    follow_parent()
    assert threading.active_count() == before


def test_a_missing_vllm_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what `import vllm` finds where it is not installed
    config = Config.model_validate({"rollout": {"backend": "vllm"}})
    with pytest.raises(EngineConfigError, match=r"not installed: install the extra `vllm`.*transformers"):
        create_engine(config, None, frozenset())


CALLS: dict[str, Callable[[VllmAdapter], Awaitable[object]]] = {
    "begin": lambda adapter: adapter.begin(),
    "pause": lambda adapter: adapter.pause(forget_cache=False),
    "sleep": lambda adapter: adapter.sleep(),
    "wake": lambda adapter: adapter.wake(),
    "resume": lambda adapter: adapter.resume(),
    "apply": lambda adapter: adapter.apply(1),
    "load": lambda adapter: adapter.load({}, 1),
}


def test_processes_that_died_are_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies after it has said that it is there: vLLM's own calls never return."""
    monkeypatch.setattr(vllm_adapter, "WATCH_SECONDS", 0.01)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    core = SimpleNamespace(call_utility_all_async=never, pause_scheduler_async=never)
    vllm = SimpleNamespace(errored=False, engine_core=core, sleep=never, wake_up=never)
    vllm.resume_generation = vllm.update_weight_version = never

    async def ask(engine: subprocess.Popen[bytes]) -> None:
        adapter = object.__new__(VllmAdapter)
        adapter._llm, adapter._members, adapter._lora_request = vllm, None, None
        adapter._processes = [psutil.Process(engine.pid)]
        asked = {name: asyncio.ensure_future(call(adapter)) for name, call in CALLS.items()}
        await asyncio.sleep(0.05)
        assert not [name for name, one in asked.items() if one.done()]
        engine.kill()
        engine.wait(PATIENCE)
        for one in asked.values():
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(EngineFailed, match="have died"):
                    await one

    with subprocess.Popen(["sleep", "600"]) as engine:
        asyncio.run(ask(engine))


def test_what_a_killed_replica_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host, "MAX_SOCKET_PATH", 4096)
    for name in ("VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR"):  # torch sets the latter in this process
        monkeypatch.delenv(name, raising=False)
    lives, killed = Scratch(), Scratch()
    (killed.path / "socket").touch()
    for lock in killed._locks.values():
        os.close(lock)  # as the kernel does
    foreign = [tmp_path / "cosmos-vllm-anothers-1", tmp_path / f"{lives.path.name[:-8]}link"]
    foreign[0].mkdir()  # of another machine, whose locks are not seen here
    foreign[1].symlink_to(tmp_path)
    following = Scratch()
    assert set(tmp_path.iterdir()) == {lives.path, following.path, *foreign}
    given = following.environment()
    assert given["TMPDIR"] == given["VLLM_RPC_BASE_PATH"] == str(following.path)
    assert Path(given["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path, "it outlives the replica"
    assert stat.S_IMODE(following.path.stat().st_mode) == 0o700
    for one in (lives, following, following):
        one.remove()
    assert set(tmp_path.iterdir()) == set(foreign)


def test_sockets_fit_into_their_addresses_however_deep_temporary_files_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    made = Scratch()
    try:
        given = made.environment()
        assert Path(given["TMPDIR"]).parent == deep, "/tmp may be small"
        assert len(given["VLLM_RPC_BASE_PATH"] + "/00000000-0000-0000-0000-000000000000") <= 107
    finally:
        made.remove()
    assert not made.sockets.exists()
