"""Several policy replicas over HTTP: who begins an epoch and who joins it, who may commit, and who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controller.client import Call, Refused
from controller.client import calls as api
from controller.state.situation import sentence
from policy_worker.errors import LeftBehindError
from schema.config import Config
from schema.wire.messages import ErrorCode, EventKind, HeartbeatReply, HeartbeatRequest
from schema.wire.messages.members import MemberReply, MemberRequest
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Trainer
from tests.controller.services.test_recovery import session_of
from tests.support.controller import make_config
from tests.support.served import ServedController

KIND = {"code": "abc", "ranks": "1"}


def several(**sections: Any) -> Config:
    policy = {"parallelism": {"n_init_replicas": 2}}
    return make_config(policy=policy, train={"ckpt": {"enable_checkpoint": True}}, controller=PATIENT, **sections)


def ask(who: Trainer, at: str, step: int = 0, **more: Any) -> MemberReply:
    facts = {"kind": KIND} if at == "join" else {}
    known = {"incarnation": who.reply.incarnation, "policy_epoch": who.reply.policy_epoch}
    request = MemberRequest.model_validate(known | {"at": at, "step": step} | facts | more)
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
    assert (found.action, found.parts, found.leads) == ("train", [1], False)
    assert found.members == ["policy-0.2", "policy-1.2"]
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
    events = [event.data["members"] for event in served.job.events.after(0) if event.kind is EventKind.MEMBERS]
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


def pair(stage: Stage) -> tuple[ServedController, Trainer, Trainer]:
    """Two members before step 0 of supervised training."""
    supervised = {"train_policy": {"type": "sft"}, "ckpt": {"enable_checkpoint": True}}
    policy = {"parallelism": {"n_init_replicas": 2}}
    sections = {"train": supervised, "policy": policy, "controller": PATIENT}
    served = stage.serve(Config.model_validate(sections), rows=64)
    one, other = stage.trainer(served), stage.trainer(served, "policy-1")
    one.register(0)
    ask(one, "join", weights="w")
    other.register(0)
    assert ask(other, "join", weights="w").action == "train"
    return served, one, other


def test_what_one_has_used_is_proof_for_those_that_only_hold_it(stage: Stage) -> None:
    """The last round is decided, one replica hears of it, and the store loses the decision; then a commit."""
    served, one, other = pair(stage)
    for who in (one, other, one):
        ask(who, "ready", epoch=2, weights="w")
    assert ask(one, "holds", epoch=2, weights="w").action == "wait"
    with stage.history_lost(served):
        assert ask(other, "holds", epoch=2, weights="w").action == "apply"
    assert ask(one, "holds", epoch=2, weights="w").action == "wait", "nobody is known to have used it"
    assert ask(other, "begin", 1, applied=2, weights="v").action == "wait"
    assert ask(one, "holds", epoch=2, weights="w").action == "apply"
    assert ask(one, "begin", 1, applied=2, leads=1, weights="v").action == "commit"
    with stage.history_lost(served):
        one.commit(0)
        ask(one, "begin", 1, applied=2, leads=1, weights="v")
        assert ask(other, "begin", 1, applied=2, weights="v").action == "train"
    with pytest.raises(Refused, match=r"step 0 is the present one here, not 1: declare yourself") as refusal:
        ask(other, "ready", 1, epoch=2, weights="v", applied=2)
    assert refusal.value.code is ErrorCode.WRONG_STEP


def test_a_replica_that_waits_to_be_healed_and_was_forgotten_registers_anew(stage: Stage) -> None:
    served, one, _ = pair(stage)
    session = session_of(served.url, "policy-2")

    def beat() -> Call[HeartbeatReply]:
        request = HeartbeatRequest(incarnation=session.reply.incarnation)
        return api.heartbeat(session.reply.replica_id, request)

    with stage.history_lost(served):
        session.register()
    with pytest.raises(LeftBehindError, match=r"does not know policy-2\.1 any more"):
        session.call(beat())
    assert served.job.membership is not None
    assert list(served.job.membership.members) == ["policy-0.1", "policy-1.1"], "nobody declared it"
    session.register()
    assert session.reply.replica_id not in ("policy-2.1", one.reply.replica_id), "an id is not used twice"
    session.call(beat())
    session.leave("done")


def test_replicas_that_all_wait_begin_a_membership_epoch_and_say_so(stage: Stage) -> None:
    served, one, other = pair(stage)
    membership = served.job.membership
    assert membership is not None
    membership.weights = ""

    def waits(seconds: float) -> str:
        actions = []
        for _ in range(2):
            actions += [ask(one, "begin", 0).action, ask(other, "begin", 0, weights="w").action]
            served.skip(seconds / 2)
        assert set(actions) == {"wait"}, "one of them never says what its weights are"
        return sentence(served.job)[0]

    membership._said.clear()
    assert "all wait for each other; a membership epoch begins in 5 s" in waits(10.0)
    assert membership.epoch == 2
    waits(6.0)
    assert membership.epoch == 3
    texts = [event.text for event in served.job.events.after(0) if event.kind is EventKind.MEMBERS]
    assert texts[-1].startswith(
        "all policy replicas waited for each other for 15 s: membership epoch 3 before step 0"
    )
    assert ask(one, "begin", 0).action == "train"
