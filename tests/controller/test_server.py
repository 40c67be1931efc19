"""The real process: started wrongly, killed, replaced, and with its Redis killed under it."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from controller.client import Client
from controller.client import calls as api
from schema.wire.messages import LeaseStatus, Phase
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import make_header, train_step
from tests.support.controller import ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.valkey import running_valkey

pytestmark = pytest.mark.slow


def picture(user: Client) -> dict[str, Any]:
    """Everything that must survive."""
    passing = {"updated_at", "replicas", "idle", "sentence", "sentence_since"}
    status = user.send(api.job()).model_dump(exclude=passing)
    groups = user._http.get("/v1/groups", params={"limit": 1000}).json()
    for group in groups:
        del group["expires"]
    return {
        "status": status,
        "ledger": user.send(api.ledger()).model_dump(),
        "groups": groups,
        "steps": [record.model_dump() for record in user.send(api.steps())],
        "validations": [record.model_dump() for record in user.send(api.validations())],
        "replicas": [(info.replica_id, info.incarnation, info.leases) for info in user.send(api.replicas())],
    }


def kill_and_start(process: ControllerProcess) -> None:
    process.stop(signal.SIGKILL)
    process.start()


def test_a_killed_controller_comes_back_as_it_was(stage: Stage) -> None:
    config = make_config(
        train={"train_policy": {"allowed_outdated_steps": 2}},
        controller=PATIENT,
        validation={"enable": True, "freq": 1, "before": True},
    )
    process = stage.process(config, rows=20)
    trainer, rollout = stage.ready(process)
    user = stage.client(process)
    rollout.finish(rollout.lease(3).groups)
    train_step(trainer, rollout, 0)
    validating = rollout.lease(1).groups[0]
    assert validating.kind == "validation"
    other = stage.joined(process, "rollout-1")
    held, half = other.lease(2).groups
    assert other.push(half, make_header(0, 1)).accepted
    before = picture(user)
    kill_and_start(process)
    assert picture(user) == before
    assert other.push(half, make_header(0, 1)).duplicate
    assert other.push(half, make_header(1, 1)).accepted
    assert all(result.accepted for result in other.finish([held]).results)
    assert rollout.push(validating, make_header(0, 1)).accepted
    assert other.beat(set()).lost_leases == []
    kill_and_start(process)
    for step in range(1, 10):
        last = train_step(trainer, rollout, step)
    assert last.finished
    ledger = user.send(api.ledger())
    assert (ledger.created, ledger.states["trained"]) == (20, 20)
    assert ledger.max_staleness <= 2


def test_every_step_may_be_the_last_of_a_controller(stage: Stage) -> None:
    """Killed between any two calls, the job ends with every group trained exactly once."""
    process = stage.process(rows=8)
    trainer, rollout = stage.ready(process)
    user = stage.client(process)

    for step in range(4):
        groups = rollout.lease(2).groups
        if step == 0:
            kill_and_start(process)
        rollout.finish(groups)
        if step == 1:
            kill_and_start(process)
        batch = trainer.batch(step)
        if step == 2:
            kill_and_start(process)
            assert trainer.batch(step) == batch
        trainer.commit(step)
        if step == 3:
            kill_and_start(process)
            assert trainer.commit(step).finished
        trainer.publish(step + 1)
        rollout.update()
    ledger = user.send(api.ledger())
    assert (ledger.created, ledger.states["trained"]) == (8, 8)
    assert ledger.staleness == {0: 16}
    trainer.leave("finished")
    kill_and_start(process)
    assert user.send(api.job()).phase is Phase.FINISHED
    assert rollout.lease().status is LeaseStatus.FINISHED


def test_a_second_controller_fences_the_first(stage: Stage) -> None:
    first = stage.process()
    _, rollout = stage.ready(first)
    group = rollout.lease().groups[0]
    run_dir = first.run_dir
    with running_controller(run_dir, stage.valkey.url, "--replace") as second:
        assert first.wait() == 3
        assert "another controller took over" in first.log()
        there = stage.rollout(second)
        there.reply, there.version, there.publication_id = rollout.reply, 0, 1
        assert there.finish([group]).results[0].accepted


def test_a_killed_redis_is_waited_for_and_nothing_is_lost(stage: Stage, tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path / "own", make_config(controller=PATIENT))
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as process:
        trainer, rollout = stage.ready(process)
        user = stage.client(process)
        rollout.finish(rollout.lease(2).groups)
        before = picture(user)
        valkey.stop(signal.SIGKILL)
        with process.client("rollout", patience=0.0) as impatient:
            answer = impatient._http.post("/v1/leases", content=rollout.lease_request().model_dump_json())
            assert answer.status_code == 503
            assert answer.json()["code"] == "store_unavailable"
            assert int(answer.headers["retry-after"]) >= 1
            assert impatient._http.get("/readyz").status_code == 503
            assert impatient._http.get("/healthz").status_code == 200
        valkey.start()
        train_step(trainer, rollout, 0)
        user.send(api.ready())
        assert before["ledger"]["states"]["ready"] == 2
        assert user.send(api.ledger()).states["trained"] == 2


def test_sigterm_ends_in_order(stage: Stage) -> None:
    process = stage.process()
    stage.ready(process)
    job_id = process.address()["job_id"]
    assert process.stop(signal.SIGTERM) == 0
    with stage.valkey.client() as client:
        assert not client.exists(f"cosmos:{job_id}:lock")
    process.start()
    assert process.address()["job_id"] == job_id
    assert "taking the job over" not in process.log()


def start_fails(process: ControllerProcess, port: int | None = None, code: int = 2) -> str:
    process.launch(port)
    assert process.wait() == code
    lines = process.log().strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path / "run", make_config())


def test_a_port_in_use_is_one_message(run_dir: Path, stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = start_fails(ControllerProcess(run_dir, stage.valkey.url), port)
    assert f"port {port} of 127.0.0.1 is in use" in message


def test_wrong_environments_are_one_message_each(run_dir: Path, stage: Stage, tmp_path: Path) -> None:
    url = stage.valkey.url
    assert "COSMOS_TOKEN_POLICY" in start_fails(ControllerProcess(run_dir, url, COSMOS_TOKEN_POLICY=""))
    log = run_dir / "controller.log"
    log.unlink()
    assert "no Redis server is configured" in start_fails(ControllerProcess(run_dir, ""))
    log.unlink()
    (run_dir / "data" / "train.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in start_fails(ControllerProcess(run_dir, url))
    log.unlink()
    config = json.loads((run_dir / "config.json").read_text())
    config["train"]["epoch"] = 0
    (run_dir / "config.json").write_text(json.dumps(config))
    assert "train.epoch" in start_fails(ControllerProcess(run_dir, url))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json cannot be read" in start_fails(ControllerProcess(empty, url))


def test_a_redis_that_fails_while_the_job_is_read_is_no_mistake_of_the_user(run_dir: Path, stage: Stage) -> None:
    """Exit code 1: start again. 2 would end the whole job."""
    (run_dir / "job_id").write_text("unreadable")
    with stage.valkey.client() as client:
        client.set("cosmos:unreadable:groups", "no table")
    message = start_fails(ControllerProcess(run_dir, stage.valkey.url), code=1)
    assert "failed while the job was read" in message
    with stage.valkey.client() as client:
        client.delete("cosmos:unreadable:groups")
    process = ControllerProcess(run_dir, stage.valkey.url)
    process.start()
    assert process.stop(signal.SIGTERM) == 0
