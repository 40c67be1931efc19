"""Rollout replicas come and go while a job runs: by hand, by signal, by kill. Nothing is lost, and nothing that is
trained depends on it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from controller.client import calls as api
from rollout_worker.worker import Worker
from schema.wire.messages import ReplicaInfo
from tests.e2e.held import REWARDS, go_on, hold
from tests.e2e.program import COMMAND, LONG, ROOT, Program, check_ledger, write_config
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAZY = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)
"""Imported before replicas share this process: transformers loads its parts when they are asked for."""
GUESTS, AT_ONCE, BOUND = 20, 3, 16
LENGTHS = """
def length(completion, row):
    return float(len(completion))

def square(completion, row):
    return float(len(completion)) ** 2
"""


class Guests:
    """Rollout replicas of this process: each joins, works, and leaves in one of three ways."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self.left: list[str] = []
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def gone(self) -> bool:
        return not self._thread.is_alive()

    async def _all(self) -> None:
        room, boot = asyncio.Semaphore(AT_ONCE), asyncio.Lock()

        async def visit(number: int) -> None:
            async with room:
                try:
                    await self._visit(number, boot)
                except BaseException as error:
                    self.errors.append(error)
                    raise

        await asyncio.gather(*(visit(number) for number in range(GUESTS)), return_exceptions=True)

    async def _visit(self, number: int, boot: asyncio.Lock) -> None:
        worker = Worker(self._url, self._token, f"guest-{number}", None)
        async with boot:  # models are made in a context that all threads of a process share
            running = asyncio.create_task(worker.run())
            await self._until(lambda: worker._booted or running.done())
        await self._until(lambda: bool(len(worker._held)) or running.done())
        worker.shutdown.ask("stop" if number % 2 else "drain", "the visit is over")
        await running
        self.left.append(f"guest-{number}")

    @staticmethod
    async def _until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG):
            while not condition():  # noqa: ASYNC110 - looks at what has no event
                await asyncio.sleep(0.02)


def replicas(program: Program) -> dict[str, ReplicaInfo]:
    with program.client() as client:
        return {info.name: info for info in client.send(api.replicas())}


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=LONG, check=False, cwd=ROOT)


def test_twenty_replicas_come_and_go(tmp_path: Path, model: Path) -> None:
    """The bound is wide and weights are kept: a guest on a busy machine is slower than a trainer of tiny steps."""
    config = write_config(tmp_path, model, bound=BOUND, steps=5000, rows=20_000, validation=False)
    config.write_text(config.read_text() + "\n[weight_sync]\nkeep = 50\n")
    with Program(config) as program:
        program.until_step(1)
        token = (program.run_dir / ".tokens" / "rollout").read_text().strip()
        guests = Guests(program.client().url, token)
        guests.start()
        program.until("all guests have come and gone", lambda _: guests.gone, timeout=2 * LONG)
        assert guests.errors == []
        assert len(guests.left) == GUESTS
        found = replicas(program)
        assert {found[name].state for name in guests.left} == {"left"}
        assert {found[name].leases for name in guests.left} == {0}
        assert all(found[name].version >= 1 for name in guests.left), "the newest weights came first"
        step = program.until_step(0).step
        program.until_step(step + 3)
        stopped = command("stop", program.run_dir, "--wait", str(PATIENCE))
        assert stopped.returncode == 0, stopped.stderr
        assert program.wait() == 130
    summary = json.loads((program.run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert sum(ledger["states"].values()) == ledger["created"]
    assert ledger["states"]["trained"] == 4 * len(summary["steps"])
    assert set(ledger["dropped"]) <= {"surplus"}
    assert (ledger["over_bound"], ledger["max_staleness"] <= BOUND) == (0, True)


def lengths_of(folder: Path, model: Path, disturb: Callable[[Program], None]) -> dict[str, Any]:
    """Moments of the lengths of all trained samples, in a job whose weights stay as they are."""
    folder.mkdir()
    config = hold(write_config(folder, model, steps=8, validation=False), step=6, rows=32)
    functions = folder / "lengths.py"
    functions.write_text(LENGTHS)
    plain = REWARDS.strip("{ }")
    text = config.read_text().replace(plain, f'"{functions}:length" = 1.0, "{functions}:square" = 1.0')
    config.write_text(text.replace("optm_lr = 1e-3", "optm_lr = 1e-30\nepoch = 1"))
    with Program(config) as program:
        disturb(program)
        go_on(program)
        summary = program.finish()
    check_ledger(summary, 2, trained=32)
    assert summary["ledger"]["dropped"] == {}
    steps = [step["metrics"] for step in summary["steps"]]
    names = ["response_tokens_mean", *(f"reward/{functions}:{name}" for name in ("length", "square"))]
    moments = {name.rpartition(":")[2]: sum(step[name] * step["samples"] for step in steps) for name in names}
    return {"samples": sum(step["samples"] for step in steps), **moments}


def test_kills_do_not_change_what_is_trained(tmp_path: Path, model: Path) -> None:
    """Every sample follows from its seed, so count, sum and sum of squares of the lengths must be the same."""

    def kill(program: Program) -> None:
        for step in (1, 4):
            program.until_step(step)
            program.kill("rollout_worker")

    calm = lengths_of(tmp_path / "calm", model, lambda program: None)
    stormy = lengths_of(tmp_path / "stormy", model, kill)
    assert calm["samples"] == 32 * 4
    assert stormy == pytest.approx(calm, rel=1e-9)


def test_sigterm_to_the_last_replica_and_drain_by_name(tmp_path: Path, model: Path) -> None:
    """One of two leaves for good; the last one is missed, and started again."""
    config = write_config(tmp_path, model, steps=2000, rows=20_000, validation=False)
    text = config.read_text()
    config.write_text(text.replace("[rollout.parallelism]", "[rollout.parallelism]\nn_init_replicas = 2"))
    with Program(config) as program:
        program.until_step(2)
        assert "there are: rollout-0, rollout-1" in command("drain", "nobody", program.run_dir).stderr
        drained = command("drain", "rollout-1", program.run_dir)
        assert drained.returncode == 0, drained.stderr
        program.until("it has left", lambda _: replicas(program)["rollout-1"].state == "left")
        assert "is left already" in command("drain", "rollout-1", program.run_dir).stderr
        os.kill(replicas(program)["rollout-0"].pid, signal.SIGTERM)
        program.until("the last one is back", lambda _: replicas(program)["rollout-0"].incarnation == 2)
        step = program.until_step(0).step
        program.until_step(step + 2)
        log = (program.run_dir / "logs" / "rollout-0.log").read_text()
        assert "may end within 12 s (launcher.shutdown_timeout = 20)" in log
        assert command("stop", program.run_dir, "--now").returncode == 0
        assert program.wait() == 130


def test_a_run_is_moved_and_goes_on_from_its_own_configuration(tmp_path: Path, model: Path) -> None:
    config = hold(write_config(tmp_path, model, steps=12, validation=False), step=4, rows=60)
    checkpoints = '[train.ckpt]\nenable_checkpoint = true\nsave_freq = 100\nsave_mode = "sync"\n'
    config.write_text(config.read_text() + checkpoints)
    with Program(config) as program:
        program.until_step(2)
        asked = command("checkpoint", program.run_dir, "--wait", str(PATIENCE))
        assert asked.returncode == 0, asked.stderr
        assert "step-" in asked.stdout
        assert command("pause", program.run_dir).returncode == 0
        assert "phase=paused" in command("status", program.run_dir).stdout
        refused = command("--resume", program.run_dir)
        assert refused.returncode == 2
        assert f"its launcher is pid {program.process.pid}" in refused.stderr
        assert command("resume", program.run_dir).returncode == 0
        assert command("stop", program.run_dir, "--wait", str(PATIENCE)).returncode == 0
        assert program.wait() == 130
    go_on(program)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    program.run_dir.rename(moved)
    told = command("status", moved)
    assert (
        told.returncode,
        f"`cosmos-launch --resume {moved}` goes on from the checkpoint" in told.stdout,
    ) == (0, True)
    resumed = command("--resume", moved)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert "12 of 12" in resumed.stdout
    assert (moved / "final" / "config.json").exists()
    again = command("--resume", moved)
    assert (again.returncode, "nothing to resume" in again.stdout) == (0, True)
