"""`placement.share = "time"`: turns go on when the trainer, a replica or the controller is killed.

The model is a mixture of experts whose routing is replayed: engines drop their cache between turns, and with it what
they recorded.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from controller.client import Client
from controller.client import calls as api
from examples.quickstart.make_model import make_model
from schema.wire.messages import ReplicaInfo
from tests.e2e.program import Program, check_ledger, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
STEPS, REPLICAS, ATTEMPTS = 12, 2, 30
LOOK_S = 1.5
"""Several heartbeats of a replica."""


def of_role(client: Client, role: str) -> list[ReplicaInfo]:
    return [one for one in client.send(api.replicas()) if one.role == role and one.state == "live"]


def stopped_in_its_turn(program: Program) -> None:
    """Stop the trainer (SIGSTOP) while it has the devices: rollout replicas stay asleep."""

    def asleep(client: Client) -> bool:
        found = of_role(client, "rollout")
        return len(found) == REPLICAS and all(one.status.startswith("asleep") for one in found)

    for _ in range(ATTEMPTS):
        trainer = program.pid_of("policy_worker")
        os.kill(trainer, signal.SIGSTOP)
        give_up = time.monotonic() + LOOK_S
        while time.monotonic() < give_up:
            with program.client() as client:
                if asleep(client):
                    return
            time.sleep(0.1)
        os.kill(trainer, signal.SIGCONT)
        time.sleep(0.1)
    raise AssertionError("the trainer was never met in its turn")


def test_turns_go_on_whoever_is_killed_in_its_own(tmp_path: Path) -> None:
    make_model(tmp_path / "mixture", seed=1, experts=4)
    config = write_config(tmp_path, tmp_path / "mixture", bound=0, steps=STEPS)
    text = config.read_text()
    for old, new in {
        "[policy]\n": '[placement]\nshare = "time"\n\n[policy]\n',
        "[rollout.parallelism]\n": f"[rollout.parallelism]\nn_init_replicas = {REPLICAS}\n",
        # mu_iterations: turns of the trainer that are met
        'type = "grpo"\n': 'type = "grpo"\nmu_iterations = 16\nrouting_replay = "weights"\n',
        "[validation]\n": "[train.ckpt]\nenable_checkpoint = true\nsave_freq = 2\n\n[validation]\n",
        "[launcher]\n": "[launcher]\nmax_restarts = 20\n",
    }.items():
        assert old in text
        text = text.replace(old, new, 1)
    config.write_text(text)
    with Program(config) as program:
        program.until_step(2)
        stopped_in_its_turn(program)
        program.kill("policy_worker")
        program.until_step(4)
        program.kill("controller")
        program.until_step(5)
        replica = program.pid_of("rollout_worker")
        os.kill(replica, signal.SIGSTOP)  # what it holds the trainer waits for
        program.until("a step that cannot begin", lambda client: of_role(client, "policy"))
        os.kill(replica, signal.SIGKILL)
        summary = program.finish()
    check_ledger(summary, 0)
    assert [step["step"] for step in summary["steps"]] == list(range(STEPS))
    last = summary["steps"][-1]["metrics"]
    assert {"offload_seconds", "onload_seconds", "turn_wait_seconds"} <= last.keys()
    assert 0 < last["trainer_turn_fraction"] < 1
    for step in summary["steps"]:
        assert step["metrics"]["mismatch/engine_k3"] < 1e-6
        assert step["metrics"]["routing/differs"] < 0.1
    assert "mismatch/unreplayed_k3" in summary["steps"][0]["metrics"]
    logs = [path.read_text() for path in program.run_dir.glob("logs/rollout-*.log")]
    assert len(logs) == REPLICAS
    assert all(re.search(r"slept for", log) for log in logs)
