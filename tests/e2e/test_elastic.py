"""Rollout replicas come and go while a job runs: by hand, by signal, by kill. Nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from controller.client import calls as api
from rollout_worker.worker import Worker
from schema.wire.messages import ReplicaInfo
from tests.e2e.loaded import sleepy
from tests.e2e.program import LONG, Program, command, write_config
from tests.support.effort import SOAK

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LAZY = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)
"""Imported before replicas share this process: transformers loads its parts when they are asked for."""
GUESTS, AT_ONCE, BOUND = 20 if SOAK else 4, 3, 16


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
        await self._until(lambda: bool(len(worker._leases)) or running.done())
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


@pytest.mark.scaled
def test_replicas_come_and_go_until_nobody_can_go_on(tmp_path: Path, model: Path) -> None:
    """Guests visit; one of the job's own two is drained for good, the last one is missed and started again. Then the
    trainer dies without a checkpoint, which ends the job by name. The bound is wide and weights are kept: a guest on
    a busy machine is slower than a trainer of tiny steps."""
    config = write_config(tmp_path, model, bound=BOUND, steps=5000, rows=20_000, validation=False)
    text = config.read_text().replace("[rollout.parallelism]", "[rollout.parallelism]\nn_init_replicas = 2")
    text = text.replace('type = "grpo"', f'type = "grpo"\n{sleepy(config, 0.1)}')
    config.write_text(text + "\n[weight_sync]\nkeep = 50\n")
    with Program(config) as program:
        program.until_step(1)
        assert "live replicas: rollout-0, rollout-1" in command("drain", "nobody", program.run_dir).stderr
        token = (program.run_dir / ".tokens" / "rollout").read_text().strip()
        guests = Guests(program.client().url, token)
        guests.start()
        drained = command("drain", "rollout-1", program.run_dir)
        assert drained.returncode == 0, drained.stderr
        program.until("it has left", lambda _: replicas(program)["rollout-1"].state == "left")
        assert "has state left already" in command("drain", "rollout-1", program.run_dir).stderr
        program.until("all guests have come and gone", lambda _: guests.gone, timeout=2 * LONG)
        assert guests.errors == []
        assert len(guests.left) == GUESTS
        found = replicas(program)
        assert {found[name].state for name in guests.left} == {"left"}
        assert {found[name].leases for name in guests.left} == {0}
        assert all(found[name].version >= 1 for name in guests.left), "the newest weights came first"
        os.kill(found["rollout-0"].pid, signal.SIGTERM)
        program.until("the last one is back", lambda _: replicas(program)["rollout-0"].incarnation == 2)
        step = program.until_step(0).step
        program.until_step(step + 3)
        log = (program.run_dir / "logs" / "rollout-0.log").read_text()
        assert "may end within 12 s (launcher.shutdown_timeout = 20)" in log
        program.kill("policy_worker")
        assert program.wait() == 1
    assert "checkpoint" in program.output()
    summary = json.loads((program.run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert sum(ledger["states"].values()) == ledger["created"]
    assert ledger["states"]["trained"] == 4 * len(summary["steps"])
    assert set(ledger["dropped"]) <= {"surplus"}
    assert (ledger["over_bound"], ledger["max_staleness"] <= BOUND) == (0, True)
