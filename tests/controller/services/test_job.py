"""A job that was stopped or has failed is opened again by `resume`, with everything it had; a finished one is not."""

from __future__ import annotations

import pytest

from controller.client import calls as api
from schema.wire.messages import LeaseStatus
from tests.controller.conftest import Stage
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
