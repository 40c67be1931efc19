"""The number of rollout replicas over HTTP: from what a real controller sees of a job, and from people."""

from __future__ import annotations

import pytest

from controller.client import calls as api
from schema.wire.messages import ErrorCode, Event, EventKind
from schema.wire.messages.autoscale import AutoscaleStatus
from tests.controller.conftest import PATIENT, Stage, asking, refused
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import make_config
from tests.support.metric_names import undocumented_families
from tests.support.served import ServedController

SCALED = make_config(
    controller=PATIENT,
    autoscale={"enable": True, "interval": 20.0, "scale_down_delay": 60.0, "max_replicas": 4},
    train={"train_policy": {"allowed_outdated_steps": 3}},
)


def step(served: ServedController, trainer: Trainer, rollout: Rollout, number: int, *, waits: float) -> None:
    """A step of four seconds of work, for whose samples the trainer waits so long."""
    assert trainer.batch(number) is None
    rollout.update()
    groups = rollout.lease(2).groups
    for _ in range(2):  # what is not looked at for longer does not count
        served.skip(waits / 2)
    rollout.finish(groups)
    assert trainer.batch(number) is not None
    served.skip(4.0)
    trainer.commit(number)
    trainer.publish(number + 1)


def number(stage: Stage, served: ServedController) -> AutoscaleStatus:
    return stage.client(served).send(api.autoscale())


def scale_events(served: ServedController) -> list[Event]:
    return [event for event in served.job.events.after(0) if event.kind is EventKind.SCALE]


def test_a_trainer_that_waits_gets_more_replicas_and_the_number_outlives_the_controller(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(SCALED, rows=100)
    assert number(stage, served).desired == 1
    for count in range(3):
        step(served, trainer, rollout, count, waits=12.0)
    found = number(stage, served)
    assert (found.desired, found.replicas, found.working, found.final) == (4, 1, 1, False)
    assert found.reason.startswith("the trainer waits 7")
    assert found.measures is not None
    assert found.measures.demand == pytest.approx(0.5, rel=0.1)  # two groups in four seconds
    assert found.measures.wait == pytest.approx(0.77, abs=0.05)
    raised = [event for event in scale_events(served) if event.data["desired"] != event.data["before"]]
    assert [(event.data["before"], event.data["desired"]) for event in raised] == [(1, 2), (2, 4)]
    assert raised[0].text.startswith("1 → 2 rollout replicas: the trainer waits")
    with asking(served.url) as http:
        metrics = http.get("/metrics").text
    assert undocumented_families(metrics) == set()
    assert f'cosmos_autoscale_desired{{job="{served.job.job_id}"}} 4.0' in metrics
    served.restart()
    assert number(stage, served).desired == 4
    assert [count for _, count in served.job.scaling.autoscaler.memory.coming] == [1, 2]


def test_a_paused_job_keeps_its_number(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(SCALED, rows=100)
    user = stage.client(served)
    step(served, trainer, rollout, 0, waits=12.0)
    assert trainer.batch(1) is None
    user.send(api.operate("pause"))
    for _ in range(12):
        served.skip(8.0)
    found = number(stage, served)
    assert (found.desired, found.reason) == (1, "the job is paused")


def test_an_outage_of_rewards_changes_no_number(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(SCALED, rows=100)
    step(served, trainer, rollout, 0, waits=12.0)
    rollout.update()
    for group in rollout.lease(3).groups:
        rollout.finish([group], score=None, rewards={}, error="TimeoutError: too\nslow", outage=True)
    assert trainer.batch(1) is None
    for _ in range(6):
        served.skip(8.0)
    found = number(stage, served)
    assert served.job.rewards.outage is not None
    assert (found.desired, found.replicas) == (1, 1)
    assert "TimeoutError: too): one prompt at a time" in found.reason


def test_a_number_by_hand_counts_until_it_is_taken_back(stage: Stage) -> None:
    served, _, _ = stage.at_work(SCALED, rows=100)
    user = stage.client(served)
    assert user.send(api.scale(3)).desired == 3
    served.skip(30.0)
    served.restart()
    served.skip(30.0)
    found = number(stage, served)
    assert (found.desired, found.manual) == (3, True)
    for replicas in (0, 5):
        refusal = refused(user.send, api.scale(replicas))
        assert refusal.code is ErrorCode.BAD_REQUEST
        assert f"{replicas} replicas are out of range" in refusal.detail
        assert "autoscale.max_replicas = 4" in refusal.detail
    found = user.send(api.scale(None))
    assert (found.desired, found.manual) == (3, False)
    assert [event.data["why"] for event in scale_events(served)][-1] == "unknown"


def test_no_replica_is_needed_of_a_job_that_is_over_and_nobody_may_ask_for_one(stage: Stage) -> None:
    served, _, _ = stage.at_work(SCALED, rows=100)
    user = stage.client(served)
    user.send(api.operate("stop"))
    served.skip(1.0)
    found = number(stage, served)
    assert (found.desired, found.final, found.reason) == (0, True, "the job is stopped")
    refusal = refused(user.send, api.scale(2))
    assert refusal.code is ErrorCode.CONFLICT
    assert "the job is stopped: it needs no replica any more" in refusal.detail
    user.send(api.operate("resume"))
    served.skip(21.0)
    found = number(stage, served)
    assert (found.desired, found.final) == (1, False)


def test_without_autoscaling_the_number_is_that_of_the_start(shared: Stage, idle: ServedController) -> None:
    found = number(shared, idle)
    assert (found.enabled, found.desired, found.minimum, found.maximum) == (False, 1, 1, 1)
    refusal = refused(shared.client(idle).send, api.scale(2))
    assert refusal.code is ErrorCode.CONFLICT
    assert "--set autoscale.enable=true" in refusal.detail


@pytest.mark.parametrize(("role", "reads"), [("user", 200), ("rollout", 200), ("policy", 200)])
def test_every_role_may_read_and_people_alone_may_ask(
    shared: Stage, idle: ServedController, role: str, reads: int
) -> None:
    with asking(idle.url, role) as http:
        answer = http.get("/v1/autoscale")
        assert (answer.status_code, answer.json()["desired"]) == (reads, 1)
        assert http.post("/v1/autoscale", json={"replicas": 1}).status_code == (409 if role == "user" else 403)
        assert http.post("/v1/autoscale", json={"replicas": -1}).status_code == (422 if role == "user" else 403)
