"""The launcher starts and drains rollout replicas as the need changes, whoever is killed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.client import calls as api
from schema.wire import event_file
from schema.wire.messages import EventKind
from schema.wire.messages.autoscale import AutoscaleStatus
from tests.e2e.loaded import loaded, put_load, sleepy
from tests.e2e.program import Program, command, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.scaled]


def number(program: Program) -> AutoscaleStatus:
    with program.client() as client:
        return client.send(api.autoscale())


def test_replicas_follow_the_load(tmp_path: Path, model: Path) -> None:
    """A reward of 0.4 s, one at a time, makes one replica too slow; a fast one makes two too many.
    The controller and a replica are killed at the peak."""
    config = write_config(tmp_path, model, steps=5000, rows=20_000, validation=False)
    loaded(config, trainer=sleepy(config, 0.1), max_replicas=2, interval=1.0, scale_down_delay=4.0)
    put_load(config, 0.4)
    with Program(config) as program:
        program.until("two replicas work", lambda _: number(program).working == 2)
        program.kill("controller")
        program.until("the number is known", lambda _: number(program).desired == 2)
        program.kill("rollout_worker")
        program.until("two replicas work again", lambda _: number(program).working == 2)
        put_load(config, 0.0)
        program.until("one is enough", lambda _: number(program).desired == 1)
        program.until("the other one has left", lambda _: number(program).replicas == 1)
        assert command("stop", program.run_dir, "--wait", "60").returncode == 0
        program.wait()
    ledger = json.loads((program.run_dir / "summary.json").read_text())["ledger"]
    assert sum(ledger["states"].values()) == ledger["created"]
    assert (ledger["over_bound"], ledger["dropped"]) == (0, {})
    output = program.output()
    assert "autoscale: 2 rollout replicas are needed (the trainer waits" in output
    # On a slow machine the killed one has not come back when one is enough.
    assert "rollout-1 is asked to leave" in output or "rollout-1 is ended before it has registered" in output
    events = event_file.read(event_file.path_of(program.run_dir))
    scaled = [event for event in events if event.kind is EventKind.SCALE]
    numbers = [e.data["desired"] for e in scaled if e.data["desired"] != e.data["before"]]
    assert numbers[:2] == [2, 1]
