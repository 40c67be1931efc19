"""`python -m rollout_worker` as a process: exit codes, kill -9, SIGTERM, a controller that dies and comes back."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from controller.client import Client
from controller.client import calls as api
from schema.config.rules import check_rules
from schema.wire.messages import Phase
from tests.controller.drivers import Rollout
from tests.rollout_worker.stage import Stage, secret_of
from tests.support.controller import TOKENS
from tests.support.forked import Forked
from tests.support.hub import refused_worker, running_hub
from tests.support.proof import http, impostor
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SECRET = "a-secret-of-this-test-alone"
PROMPTS = [f"question {i}?" for i in range(16)]


@pytest.mark.soak
def test_killed_in_the_middle_another_one_goes_on(stage: Stage) -> None:
    """A reward hangs once, so that the killed worker surely holds a lease."""
    config = stage.config(
        custom__marker=str(stage.directory / "marker-"),
        reward__timeout=600.0,
        reward__num_workers=2,  # one hangs
        train__train_policy__allowed_outdated_steps=2,
        train__train_policy__dataloader_shuffle=False,
    )
    served, trainer = stage.begin(config, PROMPTS, ["hang", *map(str, range(1, 16))])
    worker = stage.worker_process(served.url)
    trainer.step(0)
    user = stage.client(served, "user")
    until(lambda: user.send(api.ledger()).states["leased"], "a lease to die with")
    worker.stop(signal.SIGKILL)
    again = stage.worker_process(served.url)
    for t in range(1, 4):
        trainer.step(t)
    trainer.leave()
    assert again.wait() == 0, again.log.read_text()
    ledger = user.send(api.ledger())
    assert user.send(api.job()).phase == Phase.FINISHED
    assert sum(ledger.states.values()) == ledger.created
    assert ledger.max_staleness <= 2
    assert sum(ledger.staleness.values()) == 16


def test_sigterm_drains(stage: Stage) -> None:
    served, _ = stage.begin(stage.config(train__train_policy__allowed_outdated_steps=3), PROMPTS)
    worker = stage.worker_process(served.url)
    user = stage.client(served, "user")
    until(lambda: user.send(api.ledger()).states["ready"], "a finished group")
    assert worker.stop(signal.SIGTERM) == 0, worker.log.read_text()
    assert user.send(api.ledger()).states["leased"] == 0
    (replica,) = [one for one in user.send(api.replicas()) if one.role == "rollout"]
    assert replica.state == "left"


def test_sigterm_while_it_boots(stage: Stage) -> None:
    stage.prepare(stage.config(), PROMPTS)
    served = stage.serve()
    worker = stage.worker_process(served.url)
    user = stage.client(served, "user")
    until(lambda: user.send(api.replicas()), "the registration")
    assert worker.stop(signal.SIGTERM) == 0, worker.log.read_text()


def test_sigterm_while_no_controller_answers(stage: Stage) -> None:
    """It waits a minute for a controller that may be starting, and says so, but not when it is asked to leave."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        worker = stage.worker_process(url)
        with silent.accept()[0]:
            said = f"no answer from a controller at {url} (nothing has answered): is COSMOS_CONTROLLER_URL right"
            until(lambda: said in worker.log.read_text(), "a word about the address")
            assert worker.stop(signal.SIGTERM) == 0, worker.log.read_text()


def test_a_wrong_token_or_address_ends_it_with_the_remedy(stage: Stage) -> None:
    stage.prepare(stage.config(), PROMPTS)
    served = stage.serve()
    other = stage.worker_process(served.url, name="rollout-1", COSMOS_TOKEN=TOKENS["user"])
    wrong = stage.worker_process("head-node:8000")
    assert (other.wait(), wrong.wait()) == (2, 2)
    log = other.log.read_text()
    assert f"{served.url} refuses COSMOS_TOKEN: " in log
    assert ".tokens/rollout" in log
    assert TOKENS["user"] not in log
    assert "'head-node:8000' is not the address of a controller" in wrong.log.read_text()


def test_the_controller_dies_and_comes_back_and_at_last_stays_away(stage: Stage) -> None:
    config = stage.config(train__train_policy__allowed_outdated_steps=2, controller__controller_lost_timeout=30.0)
    stage.prepare(config, PROMPTS)
    controller = stage.process()
    trainer = stage.trainer(controller)
    trainer.begin()
    worker = stage.worker_process(controller.url)
    trainer.step(0)
    controller.stop(signal.SIGKILL)
    with impostor(lambda *_: http(b"", "404 Not Found"), port=int(controller.url.rpartition(":")[2])) as taken:
        until(lambda: taken.connections > 2, "attempts at what has taken the port")
    assert b"GET /v1/proof" in taken.received
    assert not [secret for secret in (TOKENS["rollout"], secret_of("rollout-0")) if secret.encode() in taken.received]
    controller.start()
    for t in range(1, 3):
        trainer.step(t)
    ledger = stage.client(controller, "user").send(api.ledger())
    assert sum(ledger.states.values()) == ledger.created
    assert sum(ledger.staleness.values()) == 12
    controller.stop(signal.SIGKILL)
    assert worker.wait() == 1
    assert "ControllerLost" in worker.log.read_text()


def test_it_leaves_when_its_launcher_is_gone(stage: Stage) -> None:
    """COSMOS_PARENT_PID names a process that is not its parent."""
    stage.prepare(stage.config(), PROMPTS)
    served = stage.serve()
    worker = stage.worker_process(served.url, COSMOS_PARENT_PID="1")
    assert worker.wait() == 0, worker.log.read_text()
    assert "is gone" in worker.log.read_text()


def test_it_ends_by_name_where_another_replica_lives_under_its_name(stage: Stage) -> None:
    stage.prepare(stage.config(controller__heartbeat_timeout=5.0), PROMPTS)
    served = stage.serve()
    holder = Rollout(stage.stack.enter_context(Client(served.url, TOKENS["rollout"], secret=f"holder-{SECRET}")))
    holder.register()
    worker = stage.worker_process(served.url, COSMOS_REPLICA_SECRET=SECRET)

    def ended() -> bool:
        holder.beat()
        return worker.process.poll() is not None

    until(ended, "the end of the worker")
    log = worker.log.read_text()
    assert worker.wait() == 5, log
    assert "'rollout-0' is held by replica rollout-0.1" in log
    assert SECRET not in log


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"COSMOS_CONTROLLER_URL": "", "COSMOS_TOKEN": "x"}, "COSMOS_CONTROLLER_URL is not set"),
        ({"COSMOS_CONTROLLER_URL": "http://127.0.0.1:1", "COSMOS_TOKEN": ""}, "COSMOS_TOKEN is not set"),
        (
            {"COSMOS_CONTROLLER_URL": "http://127.0.0.1:1", "COSMOS_TOKEN": "x", "COSMOS_CPU_THREADS": "many"},
            "COSMOS_CPU_THREADS = 'many'",
        ),
        (
            {"COSMOS_CONTROLLER_URL": "http://127.0.0.1:1", "COSMOS_TOKEN": "x", "COSMOS_REPLICA_SECRET": "a" * 40},
            "COSMOS_REPLICA_SECRET can be guessed",
        ),
    ],
)
def test_an_environment_that_cannot_work_is_exit_code_2(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    worker = Forked(["rollout_worker"], {**os.environ, **environment}, tmp_path / "log")
    assert worker.wait(PATIENCE) == 2
    assert message in worker.output()


def test_settings_that_cannot_work_are_exit_code_2(stage: Stage) -> None:
    stage.prepare(stage.config(train__train_policy__reward_function="/nowhere/r.py:f"), PROMPTS)
    served = stage.serve()
    worker = stage.worker_process(served.url)
    assert worker.wait() == 2
    assert "/nowhere/r.py" in worker.log.read_text()


def test_a_model_that_only_the_replica_can_read_is_judged_before_its_engine_starts(
    stage: Stage, tmp_path: Path
) -> None:
    changes = {"policy__model_name_or_path": "owner/tiny", "rollout__backend": "vllm"}
    config = stage.config(rollout__parallelism__tp_size=3, policy__model_max_length=4096, **changes)
    assert "owner/tiny" not in "".join(problem.message for problem in check_rules(config))
    stage.prepare(config, PROMPTS)
    with running_hub() as hub:
        hub.models["owner/tiny"] = stage.models.folder
        job = {
            "COSMOS_CONTROLLER_URL": stage.serve().url,
            "COSMOS_TOKEN": TOKENS["rollout"],
            "COSMOS_REPLICA_NAME": "rollout-0",
            "COSMOS_REPLICA_SECRET": "a-secret-of-this-test-that-is-long-enough",
        }
        said = refused_worker(hub, "rollout_worker", tmp_path / "cache", **job)
    assert "rollout.parallelism.tp_size: 3 does not divide the 4 attention heads of " in said
    assert "policy.model_max_length: 4096 tokens are more than the " in said
