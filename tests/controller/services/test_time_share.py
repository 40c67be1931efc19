"""Turns on devices in common over HTTP: who is let in when, and that no lease is granted in the trainer's turn."""

from __future__ import annotations

import pytest

from controller.client import Call, Refused
from controller.client import calls as api
from controller.state.job_facts import JobFacts
from controller.state.time_share import TimeShare
from schema.wire.messages import ErrorCode, LeaseStatus
from schema.wire.messages.time_share import TurnRequest
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import make_config

SOON = 45.0
TURNS = {"controller": PATIENT, "placement": {"share": "time"}}


def exited(name: str) -> Call[None]:
    return Call("POST", f"/v1/replicas/by-name/{name}/exited", lambda _: None)


def holds(who: Trainer | Rollout, value: bool, wait_s: float = 0.0) -> bool:
    """Say what is held; whether it may be."""
    request = TurnRequest(incarnation=who.reply.incarnation, holds=value, wait_s=wait_s)
    return who.client.send(api.turn(who.reply.replica_id, request)).yours


def test_a_round_of_turns(stage: Stage) -> None:
    served = stage.serve(make_config(**TURNS))
    rollout, trainer = stage.joined(served), stage.trainer(served)
    assert not holds(rollout, False), "the first turn is the trainer's"
    trainer.register()
    assert holds(trainer, True)
    trainer.publish(0)
    rollout.update()
    other = stage.joined(served, "rollout-1")
    assert not holds(rollout, False)
    assert rollout.lease().status is LeaseStatus.PAUSED
    assert not holds(other, False)
    assert not holds(trainer, False)
    assert holds(rollout, False)
    assert holds(other, False, SOON)
    assert rollout.lease().groups
    assert not holds(trainer, True), "both are awake"
    assert rollout.lease().status is LeaseStatus.PAUSED
    assert not holds(rollout, True, SOON), "told to sleep"
    assert not holds(rollout, False)
    assert not holds(trainer, True), "one is awake"
    assert served.job.time_share.awake([rollout.reply.replica_id, other.reply.replica_id]) == ["rollout-1.1"]
    stage.client(served).send(exited("rollout-1"))
    assert holds(trainer, True, SOON), "who has died holds nothing"


def test_a_trainer_that_has_died_is_not_waited_for_and_its_successor_begins(stage: Stage) -> None:
    served = stage.serve(make_config(**TURNS))
    rollout, trainer = stage.joined(served), stage.trainer(served)
    trainer.register()
    assert not holds(rollout, False), "it has the devices from its registration on"
    stage.client(served).send(exited("policy-0"))
    assert holds(rollout, False, SOON)
    trainer.register()
    assert not holds(rollout, True, SOON)
    assert not holds(trainer, True)
    assert not holds(rollout, False)
    assert holds(trainer, True, SOON)


def test_a_controller_that_is_restarted_knows_whose_turn_it_is(stage: Stage) -> None:
    served = stage.serve(make_config(**TURNS))
    rollout, trainer = stage.joined(served), stage.trainer(served)
    trainer.register()
    assert not holds(rollout, False)
    assert not holds(trainer, False)
    assert served.job.facts.devices_given == served.job.facts.policy_epoch
    restored = JobFacts.from_record(served.job.facts.to_record())
    assert not TimeShare(restored.devices_given).of_policy(restored.policy_epoch, trainer_present=True)


def test_jobs_without_turns_refuse_the_call(stage: Stage) -> None:
    _, trainer, _ = stage.at_work()
    with pytest.raises(Refused) as refused:
        holds(trainer, True)
    assert refused.value.code is ErrorCode.CONFLICT
    assert 'placement.share = "none"' in str(refused.value)
