"""Demand, supply and waiting of a job, by hand-made numbers."""

from __future__ import annotations

import pytest

from controller.autoscale.meter import GAP, Measured, Meter, MeterLevels

FULL = MeterLevels(held=40, asked=0, replicas=10)


def steps(meter: Meter, levels: MeterLevels, count: int, work: int = 10, wait: int = 0, groups: int = 20) -> None:
    """So many steps from where the meter is: each waits, works and is committed; a step's groups become ready."""
    now, ready = meter._now.at, meter._now.ready
    for _ in range(count):
        meter.trainer(now, "waits")
        for does, seconds in (("waits", wait), ("works", work)):
            for _ in range(seconds):
                meter.trainer(now, does)  # type: ignore[arg-type]
                meter.look(now, levels, ready, ready * 100)
                now += 1.0
        ready += groups
        meter.look(now, levels, ready, ready * 100)
        meter.committed(now, groups)


def measured(meter: Meter, seconds: float = 1.0) -> Measured:
    found = meter.window(meter._now.at, seconds)
    assert found is not None
    return found


def started() -> Meter:
    meter = Meter(0.0)
    meter.look(0.0, FULL, 0, 0)
    return meter


def test_nothing_is_measured_before_a_step_is_trained():
    meter = started()
    meter.trainer(0.0, "waits")
    assert meter.window(5.0, 1.0) is None
    meter.committed(5.0, 20)
    assert meter.window(5.0, 1.0) is None, "no group was made"


def test_demand_does_not_depend_on_waiting_and_supply_does_not_depend_on_demand():
    busy, waiting = started(), started()
    steps(busy, FULL, 4, work=10)
    steps(waiting, FULL, 4, work=10, wait=10)
    a, b = measured(busy), measured(waiting)
    assert (a.demand, b.demand) == (2.0, 2.0), "20 groups in 10 s of work"
    assert (a.wait, b.wait) == (0.0, 0.5)
    assert (a.rate, b.rate) == (0.2, 0.1), "20 groups of 10 replicas in 10 s, and in 20 s"
    assert (a.need, b.need) == (10.0, 20.0), "with which nobody waits"
    assert (a.lease_age, b.lease_age) == (20.0, 40.0)
    assert a.tokens_per_s == 20.0


def test_what_the_bound_holds_back_is_supply():
    meter = started()
    steps(meter, MeterLevels(held=20, asked=20, replicas=10), 4)
    found = measured(meter)
    assert found.throttled == 0.5
    assert found.need == 5.0
    assert found.capacity == 4.0


@pytest.mark.parametrize(
    ("levels", "lack"),
    [
        (FULL, 0.5),
        (MeterLevels(held=40, asked=20, replicas=10), 0.0),
        (MeterLevels(held=40, asked=0, replicas=10, late=True), 0.0),
    ],
)
def test_more_replicas_help_only_a_trainer_that_waits_for_what_they_could_make(levels, lack):
    meter = Meter(0.0)
    meter.look(0.0, levels, 0, 0)
    steps(meter, levels, 4, wait=10)
    assert measured(meter).wait == 0.5
    assert measured(meter).lack == lack


def test_half_of_a_group_that_is_under_way_counts_as_made():
    meter = Meter(0.0)
    meter.look(0.0, MeterLevels(held=0, asked=0, replicas=10), 0, 0)
    meter.trainer(0.0, "waits")
    meter.look(0.0, FULL, 0, 0)
    meter.trainer(1.0, "works")
    for second in range(2, 11):
        meter.look(float(second), FULL, 0, 0)
    meter.look(10.0, FULL, 10, 0)
    meter.committed(10.0, 10)
    assert measured(meter).rate == (10 + 40 / 2) / (10 * 10)


def test_a_window_is_the_newest_that_is_long_enough():
    meter = started()
    steps(meter, FULL, 10, work=10)
    steps(meter, FULL, 10, work=5)
    assert measured(meter, 1.0).demand == 4.0
    assert measured(meter, 50.0).began == meter._now.at - 50.0
    assert measured(meter, 1e9).began == 0.0
    assert measured(meter, 1e9).demand == pytest.approx(400 / 150)


def test_time_without_a_look_or_with_a_hold_is_not_counted():
    meter = started()
    steps(meter, FULL, 4)
    before, now = measured(meter, 1e9), meter._now.at
    meter.look(now, None, meter._now.ready, meter._now.tokens)
    meter.look(now + 5.0, None, meter._now.ready, meter._now.tokens)
    meter.look(now + 5.0, FULL, meter._now.ready, meter._now.tokens)
    meter.look(now + 6.0 + GAP, FULL, meter._now.ready, meter._now.tokens)
    after = measured(meter, 1e9)
    assert (after.rate, after.demand, after.wait) == (before.rate, before.demand, before.wait)


def test_marks_have_a_least_distance():
    meter = started()
    meter.trainer(0.0, "waits")
    for second in range(1, 100):
        meter.look(float(second), FULL, second, 0)
        meter.trainer(float(second), "works")
        meter.committed(float(second), 1, spacing=10.0)
    assert len(meter._marks) == 10


def test_a_restart_forgets_windows():
    meter = started()
    steps(meter, FULL, 4)
    meter.restart()
    assert meter.window(meter._now.at, 1.0) is None
    steps(meter, FULL, 2, work=5)
    assert measured(meter).demand == 4.0


def test_the_beginning_is_the_time_before_the_first_commit():
    meter = Meter(0.0)
    assert meter.beginning(0.0) is None
    meter.look(0.0, FULL, 0, 0)
    assert meter.beginning(1.0) is None, "no trainer has asked"
    meter.trainer(1.0, "waits")
    meter.look(5.0, FULL, 20, 0)
    found = meter.beginning(9.0)
    assert found is not None
    assert (found.seconds, found.lacked, found.held, found.ready) == (8.0, 8.0, 40, 20)
    assert found.lease_age == 8.0
    meter.committed(9.0, 20)
    assert meter.beginning(9.0) is None
