"""A loop that fails long after the start ends the replica: it must not stay, holding leases and making nothing."""

from __future__ import annotations

import psutil
import pytest

from controller.client import calls as api
from tests.rollout_worker.stage import Stage
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def test_rewards_that_cannot_be_started_any_more_end_the_replica(stage: Stage) -> None:
    served, trainer = stage.begin(stage.config(reward__num_workers=1), [f"question {i}?" for i in range(16)])
    worker = stage.worker_process(served.url)
    user = stage.client(served, "user")
    until(lambda: user.send(api.ledger()).states["ready"] == 4, "as many groups as the bound allows")
    (stage.directory / "rewards.py").write_text("this is no Python")
    (rewards,) = psutil.Process(worker.process.pid).children()
    rewards.kill()
    trainer.step(0)  # now there is room for two more groups
    assert worker.wait() == 1
    assert "RewardPoolError" in worker.log.read_text()
