"""The sentence that is always true, from the first registration to the end; and what would make a job faster."""

from __future__ import annotations

import pytest

from controller.client import calls as api
from controller.state.situation import RECENT, advice
from schema.wire.messages import JobStatus
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import make_config


def test_at_every_moment_it_is_said_what_the_job_waits_for(stage: Stage) -> None:
    served = stage.serve(make_config(train={"train_policy": {"allowed_outdated_steps": 0}}, controller=PATIENT))
    user = stage.client(served)

    def now(*words: str) -> JobStatus:
        status = user.send(api.job())
        for word in words:
            assert word in status.sentence, status.sentence
        return status

    now("waits for a trainer", "none has registered")
    trainer = Trainer(stage.client(served, "policy"))
    trainer.register()
    now("waits for the first weights of policy-0")
    trainer.publish(0)
    now("step 0 waits for a rollout replica", "none has registered")
    rollout = Rollout(stage.client(served, "rollout"))
    rollout.register()
    now("step 0 waits for version 0 in rollout-0")
    rollout.beat(status="looking around")
    since = now("step 0 waits for 2 more groups", "none is leased yet by rollout-0 (looking around)").sentence_since
    groups = rollout.lease(2).groups
    served.skip(60.0)
    assert now("2 are leased", "by rollout-0 60 s ago", "0 of their 4 samples").sentence_since != since
    rollout.beat(
        gauges={
            "scoring": 3.0,
            "scoring_oldest_s": 9.0,
            "running": 0.0,
            "reward_wait_seconds": 4.0,
            "leased_seconds": 10.0,
        }
    )
    status = now("step 0 waits for rewards: 3 samples in the pool, the oldest for 9 s")
    assert status.rewards is not None
    assert (status.rewards.scoring, status.rewards.wait_fraction) == (3, 0.4)
    rollout.finish(groups[:1])
    done = {"reward_retried": 2.0, "reward_attempts": 8.0, "reward_seconds": 4.0}
    rollout.beat(gauges={"running": 2.0, "longest_tokens": 2911.0, **done})
    status = now("0 waits for 1 more group (1 are leased", "the longest unfinished one has 2,911 tokens so far")
    assert status.rewards is not None
    assert (status.rewards.retried, status.rewards.attempt_seconds_mean) == (2, 0.5)
    rollout.finish(groups[1:])
    trainer.beat(status="saving checkpoint 0")
    now("step 0 is complete and waits for policy-0 (saving checkpoint 0)")
    assert trainer.batch(0) is not None
    now("step 0 is being trained by policy-0")
    trainer.commit(0)
    now("step 1 waits for")
    user.send(api.operate("pause"))
    now("the job is paused")
    user.send(api.operate("resume"))
    rollout.leave()
    now("step 1 waits for a rollout replica: rollout-0 is left (done)")
    trainer.leave("by SIGTERM")
    now("waits for a trainer: policy-0 is left (by SIGTERM)")
    user.send(api.operate("stop"))
    rewards = now("stopped after 1 of").rewards
    assert rewards is not None
    assert (rewards.wait_seconds, rewards.wait_fraction, rewards.retried) == (4.0, 0.4, 2), "of those that left too"


@pytest.mark.parametrize(
    ("rollouts", "idle", "step", "wait", "words"),
    [
        (2, 0.0, 2.0, 0.0, []),
        (1, 0.0, 10.0, 2.0, ["one more rollout replica (1 → 2)", "1.25 times"]),  # the trainer's 8 s are left
        (2, 0.0, 10.0, 9.0, ["one more rollout replica (2 → 3)", "1.50 times"]),
        (2, 0.5, 10.0, 5.0, ["allowed_outdated_steps = 3 instead of 2", "at most 2.00 times"]),
        (2, 0.5, 10.0, 0.0, ["1 of 2 replicas would do"]),
        (2, 0.2, 10.0, 0.0, ["a faster trainer"]),  # one replica would need 16 s
        (8, 0.9, 10.0, 0.0, ["1 of 8 replicas would do"]),
        (8, 1.0, 10.0, 0.0, ["1 of 8 replicas would do"]),
    ],
)
def test_advice_follows_from_what_both_pools_need(
    rollouts: int, idle: float, step: float, wait: float, words: list[str]
) -> None:
    steps = [
        {},
        {"step_seconds": step - 1.0, "wait_seconds": wait},
        {"step_seconds": step + 1.0, "wait_seconds": wait},
    ]
    steps *= RECENT // 2
    found = advice({"rollout": idle}, steps, None, rollouts=rollouts, bound=2)
    assert len(found) == bool(words), found
    for word in words:
        assert word in found[0]
    assert advice({"rollout": idle}, steps, None, rollouts=rollouts, bound=2, overlaps=False) == [], "in turns"
    (reward,) = advice({"rollout": idle}, steps, 0.4, rollouts=rollouts, bound=2, overlaps=False)
    assert "wait for rewards 40%" in reward
    assert advice({"rollout": idle}, steps[:2], 0.4, rollouts=rollouts, bound=2) == [], "it is too early to know"
