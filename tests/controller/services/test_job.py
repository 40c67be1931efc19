"""A job from its first registration to its end, and again: one that was stopped or has failed is opened by `resume`
with everything it had; a finished one is not.
"""

from __future__ import annotations

import pytest

from controller.client import Refused
from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import ErrorCode, LeaseStatus, Phase
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import train_step


@pytest.mark.parametrize("end", [api.operate("stop"), api.fail("policy-0 died 4 times")])
def test_resume_opens_a_job_again(stage: Stage, end: api.Call) -> None:
    served, trainer, rollout = stage.at_work()
    user = stage.client(served)
    train_step(trainer, rollout, 0)
    assert user.send(end).phase in ("stopped", "failed")
    status = user.send(api.operate("resume"))
    assert (status.phase, status.step, status.last_error) == ("training", 1, None)
    trainer.register(resume_step=1)
    rollout.register()
    assert rollout.lease(1).status is LeaseStatus.GRANTED
    train_step(trainer, rollout, 1)
    assert user.send(api.job()).step == 2


def test_what_is_paused_goes_on_too(stage: Stage) -> None:
    served = stage.serve()
    stage.ready(served)
    user = stage.client(served)
    user.send(api.operate("pause"))
    user.send(api.operate("stop"))
    assert user.send(api.operate("resume")).phase == "training"


def test_a_job_from_the_first_registration_to_the_end(stage: Stage) -> None:
    served = stage.serve()
    user = stage.client(served)
    assert user.send(api.job()).phase is Phase.STARTING
    trainer, rollout = stage.ready(served)
    assert rollout.version == 0
    assert user.send(api.job()).phase is Phase.TRAINING
    total = trainer.reply.total_steps
    assert total == 6
    replies = [train_step(trainer, rollout, step) for step in range(total)]
    assert [reply.committed_steps for reply in replies] == [1, 2, 3, 4, 5, 6]
    assert [reply.finished for reply in replies] == [False] * 5 + [True]
    assert user.send(api.job()).phase is Phase.FINISHING
    assert rollout.lease().status is LeaseStatus.THROTTLED
    trainer.leave("finished")
    assert rollout.lease().status is LeaseStatus.FINISHED
    status = user.send(api.job())
    assert (status.phase, status.step, status.version) == (Phase.FINISHED, 6, 6)
    ledger = user.send(api.ledger())
    for resume_step in (None, 6, 3):  # it died on its way out, and was started again
        assert refused(trainer.register, resume_step=resume_step).code is ErrorCode.JOB_FINISHED
    assert (user.send(api.job()).phase, user.send(api.ledger())) == (Phase.FINISHED, ledger)
    assert status.samples_per_s > 0
    ledger = user.send(api.ledger())
    assert ledger.created == sum(ledger.states.values()) == 12
    assert ledger.states["trained"] == 12
    assert ledger.max_staleness <= 1
    assert ledger.over_bound == 0
    assert [record.step for record in user.send(api.steps())] == list(range(6))
    assert [record.step for record in user.send(api.steps(since=4))] == [4, 5]


def test_a_supervised_job_has_steps_and_no_groups(stage: Stage) -> None:
    sft = {"train_policy": {"type": "sft"}, "train_batch_per_replica": 5, "epoch": 2}
    served = stage.serve(Config.model_validate({"train": sft}))
    trainer, user = stage.trainer(served), stage.client(served)
    reply = trainer.register()
    assert (reply.mode, reply.total_steps) == ("sft", 5)
    assert user.send(api.job()).phase is Phase.TRAINING
    with pytest.raises(Refused, match="cannot be paused"):
        user.send(api.operate("pause"))
    for step, samples in enumerate((5.0, 1.7e308, 1.7e308, -1.7e308, 5.0)):
        last = trainer.commit(step, loss=1.0, samples=samples, tokens=10 * 5.0)
        assert user.send(api.job()).step == step + 1, "whatever a trainer claims to have counted"
    assert last.finished
    assert trainer.commit(4).committed_steps == 5
    trainer.leave("finished")
    assert user.send(api.job()).phase is Phase.FINISHED
    assert user.send(api.ledger()).created == 0
