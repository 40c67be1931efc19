"""Several policy replicas over HTTP: who begins an epoch and who joins it, who may commit, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controller.client import Refused
from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import ErrorCode, EventKind
from schema.wire.messages.members import MemberReply, MemberRequest
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Trainer
from tests.support.controller import make_config

KIND = {"code": "abc", "ranks": "1"}


def several(**sections: Any) -> Config:
    policy = {"parallelism": {"n_init_replicas": 2}}
    return make_config(
        policy=policy, train={"ckpt": {"enable_checkpoint": True}}, controller=PATIENT, **sections
    )


def ask(who: Trainer, at: str, step: int = 0, **more: Any) -> MemberReply:
    facts = {"kind": KIND} if at == "join" else {}
    request = MemberRequest.model_validate(
        {
            "incarnation": who.reply.incarnation,
            "policy_epoch": who.reply.policy_epoch,
            "at": at,
            "step": step,
            **facts,
            **more,
        }
    )
    return who.client.send(api.member(who.reply.replica_id, request))


def test_the_first_one_begins_and_alone_may_commit_until_it_dies(stage: Stage) -> None:
    served = stage.serve(several())
    one, other = stage.trainer(served), stage.trainer(served, "policy-1")
    one.register(None)
    other.register(None)
    assert served.job.membership is not None
    assert served.job.membership.members == {}, "nobody has said what it begins with"
    one.register(0)
    epoch = one.reply.policy_epoch
    assert other.register(0).policy_epoch == epoch, "it joins"
    assert ask(other, "join", weights="w").action == "wait"
    found = ask(one, "join", weights="w")
    assert (found.action, found.parts, found.leads) == ("train", [0, 1], True)
    found = ask(other, "join", weights="w", wait_s=30.0)
    assert (found.action, found.parts, found.members, found.leads) == (
        "train",
        [1],
        ["policy-0.2", "policy-1.2"],
        False,
    )
    with pytest.raises(Refused, match=r"policy-1\.2 does not lead the trainers: policy-0\.2 does") as refused:
        other.publish(0)
    assert refused.value.code is ErrorCode.STALE_INCARNATION
    one.publish(0)
    rollout = stage.joined(served)
    while (batch := other.batch(0)) is None:
        rollout.finish(rollout.lease(8).groups)
    assert one.batch(0) == batch
    assert ask(one, "ready", epoch=2).action == "wait"
    assert ask(one, "ready", epoch=2, batch="of another batch").action == "batch"
    assert ask(other, "ready", epoch=2).action == "exchange"
    assert [ask(who, "holds", epoch=2).action for who in (one, other, one)] == ["wait", "apply", "apply"]
    one.leave("a test")
    found = ask(other, "begin", 1)
    assert (found.action, found.leads) == ("commit", True)
    assert found.publication is not None
    other.commit(0)
    assert ask(other, "begin", 1, weights="v").parts == [0, 1]
    assert ask(other, "begin", 1).committed == served.job.commit_reply(publish=True)
    shown = stage.client(served).send(api.job()).members
    assert shown is not None
    assert [(member.replica_id, member.parts) for member in shown.members] == [("policy-1.2", 2)]
    events = [
        event.data["members"] for event in served.job.events.after(0) if event.kind is EventKind.MEMBERS
    ]
    assert events[:3] == [{"policy-0.2": 2}, {"policy-0.2": 1, "policy-1.2": 1}, {"policy-1.2": 2}]


def test_who_registered_for_an_earlier_epoch_and_who_is_of_another_kind_is_refused(stage: Stage) -> None:
    served = stage.serve(several())
    one, other = stage.trainer(served), stage.trainer(served, "policy-1")
    one.register(0)
    ask(one, "join", weights="w")
    other.register(0)
    with pytest.raises(Refused, match=r"policy-1\.1 cannot train with policy-0\.1, .*: code: xyz, not abc"):
        ask(other, "join", weights="w", kind=KIND | {"code": "xyz"})
    assert "policy-1.1 cannot train with" in str(served.job.facts.last_error)
    one.leave("a test")
    one.register(0)
    found = ask(other, "join", weights="w")
    assert (found.action, found.step) == ("heal", -1)
    other.register(0)
    assert ask(one, "join", weights="w").action == "train"
    assert ask(other, "join", weights="w").action == "train"


def test_one_trainer_has_nobody_to_train_with(stage: Stage) -> None:
    served = stage.serve(make_config(controller=PATIENT))
    trainer = stage.trainer(served)
    trainer.register()
    with pytest.raises(Refused, match=r"n_init_replicas = 1"):
        ask(trainer, "join")
    assert stage.client(served).send(api.job()).members is None
