from __future__ import annotations

import tracemalloc

import pytest

from controller.errors import ApiError
from controller.ledger.step_counter import StepCounter
from controller.state.step_log import WINDOW_STEPS, StepLog
from schema.wire.messages import ErrorCode, StepRecord


def log_of(*times: float, samples: int = 10, tokens: int = 100) -> StepLog:
    log = StepLog()
    for step, at in enumerate(times):
        log.add(StepRecord(step=step, at=at, metrics={}), samples, tokens)
    return log


def test_speed_counts_from_the_first_commit_on() -> None:
    speed = log_of(100.0, 102.0, 104.0).overall()
    assert (speed.samples_per_s, speed.tokens_per_s, speed.step_s) == (5.0, 50.0, 2.0)


def test_one_step_has_no_speed() -> None:
    assert log_of(100.0).recent().samples_per_s == 0.0
    assert StepLog().recent().step_s is None


def test_the_window_forgets_slow_old_steps() -> None:
    log = log_of(*[float(1000 * i) for i in range(5)], *[5000.0 + i for i in range(80)])
    assert log.recent().step_s == 1.0
    overall = log.overall().step_s
    assert overall is not None
    assert overall > 10


def test_the_window_holds_a_few_steps_however_slow() -> None:
    recent = log_of(*[1000.0 * i for i in range(2 * WINDOW_STEPS)]).recent()
    assert recent.step_s == 1000.0


def test_a_rewind_forgets_steps_and_says_which_rows_go() -> None:
    log = log_of(1.0, 2.0, 3.0)
    log.take_changes()
    log.rewind(1)
    assert [record.step for record in log.since(0)] == [0]
    assert log.take_changes() == {1: None, 2: None}
    log.add(StepRecord(step=1, at=9.0, metrics={"loss": 1.0}), 5, 50)
    (row,) = log.take_changes().values()
    assert row is not None
    restored = StepLog([row])
    assert restored.last == StepRecord(step=1, at=9.0, metrics={"loss": 1.0})


def test_a_record_is_held_as_its_numbers() -> None:
    """A hundred thousand steps are nothing to a controller."""
    steps, metrics = 500, 30
    log = StepLog()
    tracemalloc.start()
    try:
        for step in range(steps):
            values = {f"metric {index}": step + index / 7 for index in range(metrics)}
            log.add(StepRecord(step=step, at=1e9 + step / 7, metrics=values), 10, 100)
        log.take_changes()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / steps < 2 * 8 * metrics + 300
    assert log.since(steps - 1)[0].metrics["metric 7"] == steps


def test_the_counter_counts_each_step_once() -> None:
    counter = StepCounter(2)
    assert counter.commit(0)
    assert not counter.commit(0)
    with pytest.raises(ApiError) as refused:
        counter.commit(2)
    assert refused.value.code is ErrorCode.WRONG_STEP
    counter.commit(1)
    assert counter.finished
    with pytest.raises(ApiError):
        counter.commit(2)
    counter.checkpoint(1)
    counter.rewind(1)
    assert (counter.committed, counter.durable, counter.timeline) == (1, 1, 1)
    assert StepCounter.restore(2, counter.header()).header() == counter.header()
    with pytest.raises(ApiError):
        counter.rewind(2)


@pytest.mark.parametrize("restarted", [True, False], ids=["controller restarted", "paused and resumed"])
def test_a_standstill_is_not_in_the_speed(restarted: bool) -> None:
    log = log_of(*range(10))
    if restarted:
        log = StepLog(row for row in log.take_changes().values() if row is not None)
    else:
        log.begin_window()
    speeds = []
    for number, at in enumerate((36000.0, 36002.0, 36004.0), start=10):
        log.add(StepRecord(step=number, at=at, metrics={}), 10, 100)
        speeds.append(log.recent())
    assert [(speed.samples_per_s, speed.step_s) for speed in speeds] == [(10.0, 1.0), (5.0, 2.0), (5.0, 2.0)]
    log.rewind(4)
    assert log.recent().step_s == 1.0, "what is left is of before"
    for number, at in enumerate((36010.0, 36014.0), start=4):
        log.add(StepRecord(step=number, at=at, metrics={}), 10, 100)
    assert log.recent().step_s == 4.0


def test_the_newest_value_is_of_the_last_step_that_has_one() -> None:
    log = StepLog()
    assert log.newest("reward_mean") is None
    for step, metrics in enumerate(({"reward_mean": 0.0, "loss": 1.0}, {"reward_mean": 0.5}, {"loss": 2.0})):
        log.add(StepRecord(step=step, at=1.0, metrics=metrics), 1, 1)
    assert [log.newest(name) for name in ("reward_mean", "loss", "entropy")] == [0.5, 2.0, None]
    log.rewind(0)
    assert log.newest("reward_mean") is None
