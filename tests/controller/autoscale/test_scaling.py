"""From what is seen of a job to decisions, and properties of all of them."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet.scenario import Scenario, Square
from benchmarks.fleet.simulator import Simulator
from controller.autoscale.autoscaler import Limits, PastDecisions
from controller.autoscale.scaling import ReplicaScaling, Sight
from tests.support.effort import examples

NAMES = tuple(f"r{k}" for k in range(40))


def limits(minimum: int = 1, maximum: int = 30) -> Limits:
    return Limits(minimum, maximum, target_wait=0.02, scale_down_delay=60.0, groups=200, bound=4)


def sight(working: int, ready: int, **more: object) -> Sight:
    return Sight(NAMES[:working], working * 4, 0, 0, ready, ready * 100, **more)  # type: ignore[arg-type]


def test_it_decides_each_interval_and_at_once_when_the_job_is_over():
    scaling = ReplicaScaling(limits(), 15.0, PastDecisions(5), 0.0)
    due = [t for t in range(61) if scaling.look(float(t), sight(5, 0)) is not None]
    assert due == [15, 30, 45, 60]
    last = scaling.look(61.0, sight(5, 0, over="finished"))
    assert last is not None
    assert last.desired == 0


def test_without_a_trainer_the_number_stays():
    scaling = ReplicaScaling(limits(), 15.0, PastDecisions(5), 0.0)
    scaling.look(0.0, sight(5, 0))
    decision = scaling.look(15.0, sight(5, 100))
    assert decision is not None
    assert (decision.kind, decision.desired) == ("hold", 5)


def test_who_leases_for_the_first_time_is_a_start_that_was_waited_for():
    scaling = ReplicaScaling(limits(), 15.0, PastDecisions(5), 0.0)
    scaling.look(0.0, sight(5, 0))
    scaling.autoscaler.request(1.0, 8)
    for second in range(2, 40):
        scaling.look(float(second), sight(5 if second < 31 else 8, 0))
    assert scaling.working == 8
    assert scaling.autoscaler.start_time == 30.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step", "step", "wait", "lose", "join", "hold", "over", "away", "restart", "crash", "person"]
        ),
        st.integers(1, 30),
        st.integers(0, 40),
    ),
    max_size=40,
)


@settings(max_examples=examples(60), deadline=None)
@given(EVENTS, st.integers(0, 5), st.integers(5, 30), st.integers(0, 40))
def test_whatever_happens_a_decision_is_within_its_limits_and_has_a_reason(events, minimum, maximum, start):
    bounds = limits(minimum, maximum)
    scaling = ReplicaScaling(bounds, 5.0, PastDecisions(start), 0.0)
    now, working, ready, offset = 0.0, start, 0, 0
    for kind, seconds, number in events:
        before = scaling.autoscaler.memory.desired
        if kind == "crash":
            record = json.loads(json.dumps(scaling.autoscaler.memory.to_record()))
            memory = PastDecisions.from_record(record)
            assert memory == scaling.autoscaler.memory
            scaling, offset = ReplicaScaling(bounds, 5.0, memory, now), ready
        elif kind == "person":
            scaling.autoscaler.request(now, None if number > 30 else min(max(number, minimum, 1), maximum))
            before = scaling.autoscaler.memory.desired
        elif kind == "restart":
            scaling.restart()
        working = {"lose": number // 2, "join": number}.get(kind, working)
        scaling.trainer(now, {"wait": "waits", "away": "away"}.get(kind, "works"))  # type: ignore[arg-type]
        for _ in range(seconds):
            now, ready = now + 1.0, ready + working
            more = {kind: "because"} if kind in ("hold", "over") else {}
            decision = scaling.look(now, sight(working, ready - offset, stored=number, **more))
            if decision is None:
                continue
            assert decision.reason
            assert kind == "over" or decision.desired == scaling.autoscaler.memory.desired
            assert (decision.desired == 0) == (kind == "over")
            assert kind == "over" or max(1, minimum) <= decision.desired <= maximum
            if kind == "hold" and before:
                assert decision.desired == before
        if kind == "step":
            scaling.committed(now, number)


def test_a_fleet_follows_a_load_that_falls_to_a_third_and_loses_its_controller():
    scenario = Scenario(
        "square", 8, 5400.0, length=Square(1 / 3, 5400.0), outages=((900.0, 90.0), (4000.0, 60.0)),
        lost_per_hour=0.5, minimum=0, warm_up=900.0,
    )  # fmt: skip
    result = Simulator(scenario).run()
    numbers = {point.at: point.desired for point in result.points}
    assert (result.over_bound, result.max_staleness) == (0, scenario.bound)
    assert 8 <= numbers[2700.0] <= 11
    assert 3 <= numbers[5400.0] <= 5
    assert result.idle < 0.05
    assert all(decision.reason for _, decision in result.decisions)
