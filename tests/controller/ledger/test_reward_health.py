"""When failing rewards hold a run up, when they stop it, and how data that runs out ends it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from controller.client import Refused
from controller.client import calls as api
from controller.ledger.reward_health import Failure, RewardHealth, Stop, failure_of
from schema.config import Config
from schema.wire.messages import LeaseStatus, Phase
from tests.controller.conftest import Stage
from tests.controller.drivers import Rollout, make_header
from tests.support.controller import make_config
from tests.support.served import served_controller
from tests.support.waiting import PATIENCE, until

OUTAGE = "ConnectionError: [Errno 111] refused\nin reward function judge.py:ask\nTraceback …"
BROKEN = "TypeError: score() takes 3 arguments, row {row}\nin reward function mine.py:score\nTraceback …\n  File …"


def failed(error: str, **changes: object) -> Failure | None:
    return failure_of([make_header(0, 0, score=None, rewards={}, error=error, **changes)], kept_score=False)


def fault(row: int = 0, error: str = BROKEN) -> Failure | None:
    return failed(error.format(row=row))


def too_long() -> Failure | None:
    return failed("PromptTooLong: no room", finish_reason="abort")


def outage() -> Failure | None:
    return failed(OUTAGE, outage=True)


def run(health: RewardHealth, attempts: Sequence[tuple[int, Failure | None]]) -> Stop | None:
    """Attempts at prompts by number, one second after the other, until one stops the run."""
    for second, (prompt, failure) in enumerate(attempts):
        stop = health.observe(f"e0-p{prompt}", f"lease-{second}", failure, float(second))
        if stop is not None:
            return stop
    return None


KEY = "KeyError: 'x'\nin reward function mine.py:score\n"
OTHER = "TypeError: no\nin reward function mine.py:other\n"
SCORED = None


def faults(*numbers: int) -> list[tuple[int, Failure | None]]:
    """An attempt at each prompt of a range, which fails."""
    return [(i, fault(i)) for i in range(*numbers)]


def scored(n: int) -> list[tuple[int, Failure | None]]:
    return [(i, SCORED) for i in range(n)]


@pytest.mark.parametrize(
    ("groups_per_step", "attempts", "says"),
    [
        # the first groups of a step, whatever the messages say of the rows
        (4, faults(4), "not one prompt was scored: 4 of the first 4 "),
        (4, faults(3), ""),
        (4, [(0, fault(0, KEY)), *faults(1, 5)], "not one prompt was scored: 4 of the first 5 "),
        (4, [(i, fault(i, [BROKEN, KEY, OTHER][i % 3])) for i in range(9)], ""),
        (4, [(0, SCORED), *faults(1, 30)], ""),
        # one bad prompt is no broken reward, however often it is tried
        (4, [(0, fault())] * 64, ""),
        (1, [(0, fault())] * 64, ""),
        (1, [(0, fault(0)), (1, fault(1))], "not one prompt was scored: 2 of the first 2 "),
        # nothing was generated, so nothing could be scored
        (4, [(i, too_long()) for i in range(64)], ""),
        # more than half of the window
        (4, [*scored(31), *faults(31, 64)], "33 of the last 64 attempts"),
        (4, [*scored(32), *faults(32, 64)], ""),
        (128, faults(33), "not one prompt was scored: 33 of the last 33 attempts"),
        (4, [(i, SCORED if i % 2 else fault(i)) for i in range(1, 300)], ""),
        # a fifth of the rows is bad and tried five times: most attempts fail, most prompts do not
        (4, [(i, SCORED if i % 5 else fault(i)) for i in range(1, 200) for _ in range(1 if i % 5 else 5)], ""),
        # connection errors stop nothing before their time
        (4, [(i, outage()) for i in range(99)], ""),
        (4, [(i, outage()) for i in range(101)], "no prompt was scored for reward.outage_timeout = 100 s"),
        (4, [(i, SCORED if i == 50 else outage()) for i in range(140)], ""),
    ],
)
def test_what_stops_a_run(groups_per_step: int, attempts: list[tuple[int, Failure | None]], says: str) -> None:
    stop = run(RewardHealth(groups_per_step, 100.0, scored=False), attempts)
    assert (stop is None) == (says == "")
    if stop is not None:
        assert stop.reason.startswith(says)
        assert "\n" not in stop.reason
        assert stop.traceback.count("Traceback") == 1


def test_after_a_restart_it_is_not_the_beginning() -> None:
    broken = faults(33)
    assert run(RewardHealth(4, 100.0, scored=True), broken[:32]) is None
    stop = run(RewardHealth(4, 100.0, scored=True), broken)
    assert stop is not None
    assert stop.reason.startswith("33 of the last 33 attempts")


def test_an_outage_is_probed_one_prompt_at_a_time_with_growing_waits() -> None:
    health = RewardHealth(4, 1000.0, scored=True)
    run(health, [(i, outage()) for i in range(4)])
    assert "judge.py:ask" in health.note
    now, waits = 3.0, []
    for number in range(9):
        began = now
        while not health.may_probe(now):
            now += 0.5
        waits.append(now - began)
        health.probe = f"e0-p{number}", "probe"
        assert not health.may_probe(now + 100), "one at a time"
        health.observe("e0-p99", "from before", outage(), now)
        assert health.probe is not None, "another's failure is not the probe's"
        health.observe(f"e0-p{number}", "probe", outage(), now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    health.observe("e0-p99", "from before, too", None, now)
    assert health.note == "", "whatever is scored ends it"


@pytest.mark.parametrize("length", [4, 8])
def test_single_time_outs_are_no_outage(length: int) -> None:
    health = RewardHealth(length, 10.0, scored=True)
    for _ in range(20):
        assert run(health, [(0, None), *((i, outage()) for i in range(1, length))]) is None
        assert health.outage is None
    run(health, [(0, None), *[(0, outage())] * 20])
    assert health.outage is None, "nor is one prompt that always takes too long"


# ---- with a controller ---------------------------------------------------------------------------------------------


def failing(rollout: Rollout, n: int, error: str, *, outage: bool = False) -> list[str]:
    """Lease n groups and push them without a score; their ids."""
    groups = rollout.lease(n).groups
    rollout.finish(groups, score=None, rewards={}, error=error, outage=outage)
    return [group.group_id for group in groups]


@pytest.mark.parametrize("on_error", ["retry", pytest.param("mask", marks=pytest.mark.soak), "drop"])
def test_a_broken_reward_fails_the_job_and_is_mended_by_a_resume(stage: Stage, on_error: str) -> None:
    served, trainer, rollout = stage.at_work(make_config(reward={"on_error": on_error}))
    user = stage.client(served)
    failing(rollout, 1, BROKEN)
    assert user.send(api.job()).phase is Phase.TRAINING
    failing(rollout, 2, BROKEN)
    status = user.send(api.job())
    assert status.phase is Phase.FAILED
    assert (status.last_error or "").startswith("not one prompt was scored")
    assert status.traceback.startswith("TypeError: score() takes 3 arguments")
    assert rollout.lease().status is LeaseStatus.FINISHED
    with pytest.raises(Refused, match="not one prompt was scored"):
        trainer.batch(0)
    served.stop()
    served = stage.stack.enter_context(served_controller(served.job.run_dir, stage.valkey.url))
    user, rollout = stage.client(served), stage.rollout(served, "rollout-1")
    assert user.send(api.job()).traceback == status.traceback, "it is stored"
    assert user.send(api.operate("resume")).traceback == ""
    stage.trainer(served).register(resume_step=None)
    rollout.register()
    failing(rollout, 1, BROKEN)
    rollout.finish(rollout.lease(1).groups)
    failing(rollout, 1, BROKEN)
    assert user.send(api.job()).phase is Phase.TRAINING


@pytest.mark.parametrize("on_error", ["retry", "mask", pytest.param("drop", marks=pytest.mark.soak)])
def test_an_outage_pauses_the_leases_until_a_probe_is_scored(stage: Stage, on_error: str) -> None:
    served, _, rollout = stage.at_work(make_config(reward={"on_error": on_error, "outage_timeout": 60.0}))
    user = stage.client(served)
    groups = rollout.lease(4).groups
    for group in groups:  # two begin the outage, two come later
        rollout.finish([group], score=None, rewards={}, error=OUTAGE, outage=True)
    reply = rollout.lease()
    assert reply.status is LeaseStatus.PAUSED
    assert reply.reason == user.send(api.job()).note != ""
    assert "judge.py:ask" in reply.reason
    assert user.send(api.ledger()).dropped == ({} if on_error == "retry" else {"reward_error": 2})
    served.skip(1.5)
    (probe,) = rollout.lease(4).groups
    other = stage.joined(served, "rollout-1")
    assert other.lease().status is LeaseStatus.PAUSED, "one probe for all replicas"
    rollout.finish([probe], score=None, rewards={}, error=OUTAGE, outage=True)
    served.skip(1.1)
    assert rollout.lease().status is LeaseStatus.PAUSED, "the next probe waits longer"
    served.skip(1.0)
    (another,) = other.lease(4).groups
    assert another.group_id != probe.group_id, "prompts take turns: a bad one holds up nobody"
    other.leave()  # a probe that nobody holds any more is replaced
    (probe,) = rollout.lease(4).groups
    rollout.finish([probe])
    status = user.send(api.job())
    assert (status.phase, status.note) == (Phase.TRAINING, "")
    assert len(rollout.lease(4).groups) > 1
    assert user.send(api.ledger()).dropped == ({} if on_error == "retry" else {"reward_error": 2})


def test_a_long_outage_costs_no_prompt_and_bad_prompts_do_not_prolong_it(stage: Stage) -> None:
    patient = {"heartbeat_timeout": 1e5, "lease_timeout": 1e5}
    served, _, rollout = stage.at_work(make_config(controller=patient))
    bad = failing(rollout, 2, OUTAGE, outage=True)
    probes: list[str] = []
    while not probes or probes[-1] in bad:  # only these wait
        served.skip(60.0)
        probes += failing(rollout, 4, OUTAGE, outage=True)
    assert len(probes) == 9, "each once before the outage, and four times during it; then a new prompt"
    assert stage.client(served).send(api.ledger()).dropped == {}


def test_prompts_of_a_round_of_validation_take_turns_during_an_outage(stage: Stage) -> None:
    served, _, rollout = stage.at_work(validating(), validation_rows=5)
    failing(rollout, 2, OUTAGE, outage=True)
    probes: list[str] = []
    for seconds in (1.0, 2.0, 4.0):
        served.skip(seconds + 0.5)
        probes += failing(rollout, 3, OUTAGE, outage=True)
    assert len(set(probes)) == 3


def test_an_outage_stops_the_run_after_its_time(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(reward={"outage_timeout": 60.0}))
    user = stage.client(served)
    failing(rollout, 2, OUTAGE, outage=True)
    served.skip(59.0)
    failing(rollout, 1, OUTAGE, outage=True)
    assert user.send(api.job()).phase is Phase.TRAINING
    served.skip(5.0)
    failing(rollout, 1, OUTAGE, outage=True)
    status = user.send(api.job())
    assert status.phase is Phase.FAILED
    assert "reward.outage_timeout = 60 s" in (status.last_error or "")


def test_a_request_that_is_held_open_becomes_the_probe_when_it_is_due(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    failing(rollout, 2, OUTAGE, outage=True)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(rollout.lease, 4, wait_s=60.0)
        until(lambda: served.call(lambda: len(served.controller.leases._waiting)), "a request that waits")
        served.skip(1.5)
        assert len(waiting.result(PATIENCE).groups) == 1


def validating(**validation: object) -> Config:
    return make_config(validation={"enable": True, "dataset": {"name": "synthetic:addition"}, **validation})


def test_a_round_of_validation_counts_where_it_is_scored_alike(stage: Stage) -> None:
    for config, phase in ((validating(), Phase.FAILED), (validating(reward_function="format"), Phase.VALIDATING)):
        served = stage.serve(config)
        _, rollout = stage.ready(served)
        assert all(name.startswith("v") for name in failing(rollout, 2, BROKEN))
        assert stage.client(served).send(api.job()).phase is phase


def test_a_round_of_validation_outlasts_an_outage(stage: Stage) -> None:
    served, _, rollout = stage.at_work(validating())
    user = stage.client(served)
    groups = rollout.lease(3).groups
    for group in groups:
        rollout.finish([group], score=None, rewards={}, error=OUTAGE, outage=True)
    assert rollout.lease().status is LeaseStatus.PAUSED
    served.skip(1.5)
    (probe,) = rollout.lease(3).groups
    assert probe.group_id == groups[-1].group_id, "it came when the outage was known: it is made again"
    rollout.finish([probe])
    (record,) = user.send(api.validations())
    assert (record.samples, record.errors) == (1, 2)


# ---- data that runs out ------------------------------------------------------------------------------------------


def equal(rollout: Rollout, n: int) -> None:
    rollout.finish(rollout.lease(n).groups, score=1.0, rewards={"right": 1.0})


FILTERED = make_config(train={"train_policy": {"filter_reward_metric": ["right"]}})


def test_a_job_whose_data_runs_out_before_its_first_step_has_failed(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(FILTERED, rows=3)
    equal(rollout, 3)
    status = stage.client(served).send(api.job())
    assert status.phase is Phase.FAILED
    assert (status.last_error or "").startswith("not one of 2 steps was trained")
    assert "dropped: zero_variance 3" in status.last_error
    assert "filter_reward_metric" in status.last_error
    assert status.last_error.endswith("start a new run: this one has no prompts left"), "a resume changes nothing"
    assert stage.client(served).send(api.operate("resume")).phase is Phase.FAILED
    # No batch without samples, and nothing to export.
    with pytest.raises(Refused, match="not one of 2 steps"):
        trainer.batch(0)


def test_the_last_prompt_that_is_lost_with_its_replica_leaves_no_batch_without_samples(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(controller={"max_attempts": 1}), rows=1)
    assert len(rollout.lease().groups) == 1
    stage.client(served).send(api.replica_exited("rollout-0", "exit code 1", crashed=True))
    with pytest.raises(Refused, match="dropped: poison 1"):
        trainer.batch(0)
    assert stage.client(served).send(api.job()).phase is Phase.FAILED


def test_rewards_that_fail_in_many_ways_end_with_the_last_of_them(stage: Stage) -> None:
    served, _, rollout = stage.at_work(make_config(reward={"on_error": "drop"}), rows=3)
    for number in range(3):
        failing(rollout, 1, f"Error{number}: no\nTraceback {number}")
    status = stage.client(served).send(api.job())
    assert (status.phase, status.traceback) == (Phase.FAILED, "Error2: no\nTraceback 2")
    assert "reward_error 3" in (status.last_error or "")


def test_a_finish_short_of_the_planned_steps_says_why(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(FILTERED, rows=6)
    equal(rollout, 3)
    rollout.finish(rollout.lease(3).groups)
    assert trainer.batch(0) is not None
    trainer.commit(0)
    assert trainer.batch(1) is not None
    assert trainer.commit(1).finished
    trainer.leave("finished")
    status = stage.client(served).send(api.job())
    assert (status.phase, status.last_error) == (Phase.FINISHED, None)
    assert status.note == "finished after 2 of 3 steps: the data ran out; dropped: zero_variance 3"
