"""The real program, whose Redis loses history: cut at a random place twice, and gone altogether, in one run."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from controller.client import calls as api
from tests.e2e.held import go_on, hold
from tests.e2e.program import Program, check_ledger, command, write_config
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.e2e

CHECKPOINTS = '\n[train.ckpt]\nenable_checkpoint = true\nsave_freq = 4\nsave_mode = "sync"\n'
STEPS = 10
TRAINED = re.compile(r"step (\d+) of timeline (\d+) trains \d+ samples of versions (\d+) to (\d+): (.*)")


def audit(log: Path) -> dict[int, tuple[int, list[str]]]:
    """What the trainer's own log says: step -> oldest version and groups, of the timeline that counts."""
    steps: dict[int, tuple[int, list[str]]] = {}
    newest = -1
    for line in log.read_text().splitlines():
        match = TRAINED.search(line)
        if match is None:
            continue
        step, timeline, oldest = (int(match[number]) for number in (1, 2, 3))
        if timeline > newest:
            newest = timeline
            steps = {known: entry for known, entry in steps.items() if known < step}
        groups: list[str] = []
        for span in match[5].split():
            prefix, _, numbers = span.rpartition("p")
            first, _, last = numbers.partition("..")
            groups += [f"{prefix}p{number}" for number in range(int(first), int(last or first) + 1)]
        steps[step] = oldest, groups
    return steps


def check_truth(run_dir: Path, n_steps: int, bound: int) -> None:
    steps = audit(run_dir / "logs" / "policy-0.log")
    assert sorted(steps) == list(range(n_steps))
    trained = [name for _, groups in steps.values() for name in groups]
    assert len(set(trained)) == len(trained) == 4 * n_steps, "each group exactly once, as the trainer saw it"
    assert all(step - oldest <= bound for step, (oldest, _) in steps.items())


def redis_of(program: Program) -> psutil.Process:
    """The embedded server below the launcher."""

    def found() -> psutil.Process | None:
        for process in program.processes():
            try:
                if process.name().startswith("valkey-server"):
                    return process
            except psutil.Error:
                continue
        return None

    return until(found, "a Redis")


def lose(program: Program, share: float) -> None:
    """Kill the controller and Redis, and cut Redis' file before it is started again."""
    controller = program.pid_of("controller")
    redis = redis_of(program)
    redis.suspend()  # nothing is written any more, and nobody restarts it yet
    os.kill(controller, signal.SIGKILL)
    (newest,) = sorted((program.run_dir / "redis" / "appendonlydir").glob("*.incr.aof"))[-1:]
    size = int(newest.stat().st_size * share)
    with newest.open("r+b") as file:
        file.truncate(size)
    redis.kill()


def test_a_run_outlives_lost_history_is_moved_and_goes_on_without_redis(tmp_path: Path, model: Path) -> None:
    """Redis' file loses its end twice while the trainer lives on: nothing is trained again. Then the run is stopped,
    moved, and goes on from its checkpoint, by its own configuration, in another place."""
    chance = random.Random(5)
    config = hold(write_config(tmp_path, model, steps=STEPS), step=8, rows=80)
    config.write_text(config.read_text() + CHECKPOINTS)
    with Program(config) as program:
        for step in (2, 5):
            program.until_step(step)
            lose(program, 1 - chance.random() / 2)
        status = program.until_step(6)
        assert status.timeline == 0, "the trainer lived on: nothing was trained again"
        requested = command("checkpoint", program.run_dir, "--wait", str(PATIENCE))
        assert requested.returncode == 0, requested.stderr
        assert "step-" in requested.stdout
        assert command("pause", program.run_dir).returncode == 0
        assert "phase=paused" in command("status", program.run_dir).stdout
        with program.client() as client:
            steps = [record.step for record in client.send(api.steps())]
        assert steps == list(range(max(6, len(steps)))), "those of lost history are there again"
        refused = command("--resume", program.run_dir)
        assert refused.returncode == 2
        assert f"its launcher is pid {program.process.pid}" in refused.stderr
        assert command("resume", program.run_dir).returncode == 0
        assert command("stop", program.run_dir, "--wait", str(PATIENCE)).returncode == 0
        assert program.wait() == 130
        program.wait_no_orphans()
    go_on(program.config)
    shutil.rmtree(program.run_dir / "redis")
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    program.run_dir.rename(moved)
    answer = command("status", moved)
    assert answer.returncode == 0, answer.stderr
    assert f"`cosmos-launch --resume {moved}` goes on from the checkpoint" in answer.stdout
    resumed = command("--resume", moved)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    assert f"{STEPS} of {STEPS}" in resumed.stdout
    assert (moved / "final" / "config.json").exists()
    summary = json.loads((moved / "summary.json").read_text())
    check_truth(moved, STEPS, 2)
    ledger = check_ledger(summary, 2, trained=STEPS * 4)
    assert sum(ledger.staleness.values()) == STEPS * 16
    assert summary["status"]["timeline"] == 1
    again = command("--resume", moved)
    assert (again.returncode, "nothing to resume" in again.stdout) == (0, True)
