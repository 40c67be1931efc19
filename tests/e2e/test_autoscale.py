"""The launcher starts and drains rollout replicas as the need changes, whoever is killed meanwhile."""

from __future__ import annotations

import json
import re
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


def incarnations(program: Program) -> set[str]:
    """The rollout replicas that are up."""
    with program.client() as client:
        return {
            info.replica_id for info in client.send(api.replicas()) if (info.role, info.state) == ("rollout", "live")
        }


def test_replicas_follow_the_load(tmp_path: Path, model: Path) -> None:
    """A reward of 0.4 s, one at a time, makes one replica too slow; a fast one makes two too many.
    The controller and a replica are killed at the peak."""
    config = write_config(tmp_path, model, steps=5000, rows=20_000, validation=False)
    loaded(config, trainer=sleepy(config, 0.1), max_replicas=2, interval=1.0, scale_down_delay=4.0)
    put_load(config, 0.4)
    with Program(config) as program:
        program.until("two replicas work", lambda _: number(program).working == 2)
        program.kill("controller")
        program.until("both are known again", lambda _: len(incarnations(program)) == 2)
        before = incarnations(program)
        program.kill("rollout_worker")
        program.until(
            "another process runs", lambda _: len(incarnations(program)) == 2 and incarnations(program) != before
        )
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
    assert re.search(r"rollout-[01] is asked to leave", output)  # the one of fewest groups
    events = event_file.read(event_file.path_of(program.run_dir))
    scaled = [event for event in events if event.kind is EventKind.SCALE]
    numbers = [e.data["desired"] for e in scaled if e.data["desired"] != e.data["before"]]
    assert numbers[:2] == [2, 1]
