"""Turns of a trainer: when it asks, what leaves its devices, and that training notices nothing of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from controller.client.http import Answer
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.trained.trainer import Trainer
from policy_worker.training import time_share as module
from policy_worker.training.loop import Loop
from policy_worker.training.time_share import TimeShare
from schema.wire.messages.time_share import TurnReply, TurnRequest
from tests.policy_worker.material import make_config, make_trainer
from tests.policy_worker.training.test_loop import Scripted, loop
from weight_sync.parking import Parked

__all__ = ["loop"]


class Devices:
    """Answers as the controller does; rollout replicas need `refusals` calls to fall asleep."""

    def __init__(self, refusals: int = 0) -> None:
        self.said: list[bool] = []
        self.refusals = self.left = refusals
        self.reply = SimpleNamespace(replica_id="policy-0.1", incarnation=1)

    def call(self, call: Any) -> TurnReply:
        request = TurnRequest.model_validate_json(call.body)
        self.said.append(request.holds)
        self.left = self.refusals if not request.holds else self.left - 1
        yours = request.holds and self.left < 0
        return call.read(Answer(200, TurnReply(yours=yours).model_dump_json().encode()))


def turns(group: RankGroup, devices: Devices, shutdown: ShutdownRequest | None = None) -> TimeShare:
    return TimeShare(group, devices, shutdown or ShutdownRequest())  # type: ignore[arg-type]


def sizes(trainer: Trainer) -> set[int]:
    return {tensor.untyped_storage().nbytes() for tensor in trainer.resident()}


def test_everything_leaves_the_devices_and_training_goes_on_as_without(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Parked", partial(Parked, stays="nowhere"))
    config = make_config({"advantage_estimator": "gae", "kl_beta": 0.1}, {"ema_decay": 0.9})
    moved, still = make_trainer(config, group), make_trainer(config, group)
    taken = turns(group, Devices())
    taken.tensors = moved.resident
    assert moved.critic is not None
    for step in range(3):
        for trainer in (moved, still):
            for one in (trainer, trainer.critic):
                assert one is not None
                for number, parameter in enumerate(one.model.parameters()):
                    parameter.grad = torch.cos(torch.arange(parameter.numel()) + number + step).view_as(parameter)
                one.step(step)
        taken.give()
        assert sizes(moved) == {0}
        frozen = moved.reference
        assert isinstance(frozen, torch.nn.Module)
        for model in (moved.model, moved.critic.model, frozen):
            assert {p.untyped_storage().nbytes() for p in model.parameters()} == {0}
        taken.take()
    assert moved.ema is not None
    assert still.ema is not None
    pairs = [*zip(moved.resident(), still.resident(), strict=True)]
    assert len(pairs) > 100
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert taken.metrics.keys() == {
        "turn_wait_seconds", "onload_seconds", "offload_seconds", "trainer_turn_fraction",
    }  # fmt: skip


def test_the_devices_are_given_for_each_wait_and_asked_for_until_they_are_free(loop: Loop, group: RankGroup) -> None:
    devices = Devices(refusals=2)
    loop._time_share = turns(group, devices)
    metrics = loop.train_step(Scripted(None, "batch"), 0)
    assert devices.said == [False, True, True, True]
    assert isinstance(metrics, dict)
    assert metrics["trained"] == 1.0
    assert metrics["turn_wait_seconds"] >= 0


def test_a_trainer_that_has_to_leave_does_not_wait_for_ever(group: RankGroup) -> None:
    shutdown = ShutdownRequest()
    shutdown.grace = 0.2
    shutdown.request("test")
    devices = Devices(refusals=10**9)
    turns(group, devices, shutdown).take()
    assert set(devices.said) == {True}
