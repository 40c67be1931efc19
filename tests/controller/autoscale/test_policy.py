"""Decisions, by hand-made measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from controller.autoscale.autoscaler import Autoscaler, Limits, PastDecisions, Seen
from controller.autoscale.meter import Measured, WarmUp

LIMITS = Limits(minimum=1, maximum=1000, target_wait=0.02, scale_down_delay=300.0, groups=5000, bound=4)
USUAL = Measured(
    began=1000.0, seconds=100.0, wait=0.0, lack=0.0, refused=0.0, throttled=0.0, idle=0.0, demand=10.0, rate=0.1,
    capacity=4.0, lease_age=40.0, tokens_per_group=1000.0, replicas=100.0, step_time=20.0,
)  # fmt: skip
"""100 replicas, and so many are needed."""


def scaler(desired: int = 100, **limits: object) -> Autoscaler:
    return Autoscaler(replace(LIMITS, **limits), PastDecisions(desired))  # type: ignore[arg-type]


def decide(scaler: Autoscaler, now: float = 2000.0, working: int | None = None, **changes: object):
    found = replace(USUAL, **changes)  # type: ignore[arg-type]
    seen = Seen(found, scaler.memory.desired if working is None else working)
    return scaler.decide(now, seen)


def test_enough_stays():
    decision = decide(scaler())
    assert (decision.desired, decision.kind) == (100, "enough")


def test_a_lack_is_met_with_headroom():
    decision = decide(scaler(), lack=0.1, wait=0.1, demand=12.0)
    assert (decision.desired, decision.kind) == (126, "more")


def test_at_most_twice_as_many_at_once():
    assert decide(scaler(), lack=0.5, demand=50.0).desired == 200


def test_late_groups_and_a_bound_that_leaves_no_work_are_not_a_lack_of_replicas():
    late = decide(scaler(), wait=0.3, demand=20.0)
    assert (late.desired, late.kind) == (100, "enough")
    assert "for groups that are late" in late.reason
    one = scaler()
    for now in (900.0, 2000.0):
        bound = decide(one, now=now, wait=0.4, refused=0.4, throttled=0.6, idle=0.6, demand=20.0)
    assert (bound.desired, bound.kind) == (100, "both")
    assert "allowed_outdated_steps = 5" in bound.reason


HELD_BACK = {"wait": 0.4, "refused": 0.4, "throttled": 0.5, "demand": 13.0}
"""The bound leaves each replica half of what it can hold, and the trainer waits."""


def held_back() -> Autoscaler:
    """After the begin of a trial."""
    one = scaler()
    first = decide(one, now=1850.0, **HELD_BACK)
    assert (first.desired, first.kind) == (100, "settling"), "the load may have changed within the window"
    tried = decide(one, began=1900.0, **HELD_BACK)
    assert (tried.desired, tried.kind) == (137, "more")
    return one


def test_where_the_bound_refuses_more_are_tried_and_kept_if_they_make_more():
    one = held_back()
    assert decide(one, now=2015.0, **HELD_BACK).kind == "settling"
    kept = decide(one, now=2300.0, began=2100.0, replicas=137.0, rate=0.09, throttled=0.6, demand=13.0)
    assert (kept.desired, kept.kind) == (137, "enough")
    assert watch(one, 2315.0, 900.0, replicas=137.0, rate=0.095, throttled=0.65, demand=13.0)[-1] == 137


def test_replicas_that_were_tried_in_vain_go_again_and_are_not_tried_for_an_hour():
    one = held_back()
    again = {**HELD_BACK, "replicas": 137.0, "rate": 0.075, "throttled": 0.6}
    back = decide(one, now=2300.0, began=2100.0, **again)
    assert (back.desired, back.kind) == (100, "bound")
    assert "137 replicas made 10.3 groups/s, 100 made 10" in back.reason
    for minutes in (10, 59):
        found = decide(one, now=2300.0 + 60 * minutes, began=2400.0, **HELD_BACK)
        assert (found.desired, found.kind) == (100, "bound")
    assert decide(one, now=2300.0 + 61 * 60, began=2400.0, **HELD_BACK).desired == 137


def test_a_trial_in_which_the_load_grew_is_made_again():
    one = held_back()
    slow = {**HELD_BACK, "rate": 0.03, "throttled": 0.6}
    back = decide(one, now=2300.0, began=2100.0, replicas=137.0, **slow)
    assert (back.desired, back.kind) == (100, "bound")
    assert "137 replicas made 4.11 groups/s, 100 made 10: whether the load has changed shows now" in back.reason
    assert decide(one, now=2310.0, began=2290.0, **slow).kind == "settling"
    again = decide(one, now=2400.0, began=2310.0, **slow)
    assert (again.desired, again.kind) == (200, "more")
    assert decide(one, now=2700.0, began=2500.0, replicas=200.0, **slow | {"wait": 0.4}).desired == 200


def test_replicas_that_are_in_each_others_way_go_again():
    one = held_back()
    decide(one, now=2300.0, began=2100.0, **HELD_BACK | {"replicas": 137.0, "rate": 0.03})
    for minutes in (2, 30):
        found = decide(one, now=2300.0 + 60 * minutes, began=2310.0, **HELD_BACK)
        assert (found.desired, found.kind) == (100, "bound")
        assert "more than 100 replicas made no more" in found.reason


def test_no_trial_for_little_waiting():
    assert decide(scaler(), **{**HELD_BACK, "wait": 0.1, "refused": 0.1}).desired == 100


def test_a_small_correction_waits_until_the_last_one_shows_and_a_large_one_does_not():
    one = scaler()
    decide(one, lack=0.1, demand=12.0)
    assert decide(one, now=2015.0, lack=0.1, demand=12.5, began=1900.0).kind == "settling"
    assert decide(one, now=2015.0, lack=0.1, demand=15.0, began=1900.0).desired == 158
    assert decide(one, now=2300.0, lack=0.1, demand=15.5, began=2100.0, replicas=158.0).desired == 163


def test_replicas_that_are_missing_are_waited_for_or_replaced_beforehand():
    one = scaler()
    waiting = decide(one, working=90, lack=0.1, demand=9.0, replicas=100.0)
    assert (waiting.desired, waiting.kind) == (100, "settling")
    assert decide(one, working=90, lack=0.1, replicas=80.0).desired == 132, "a fifth is missing all the time"


def test_a_platform_that_does_not_deliver_is_not_asked_for_ever_more():
    one = scaler()
    decide(one, lack=0.1, demand=12.0)
    for hour in range(1, 5):
        decision = decide(one, now=hour * 3600.0, working=70, began=hour * 3600.0 - 100.0, lack=0.4, demand=12.0,
                          replicas=70.0)  # fmt: skip
        assert (decision.desired, decision.kind) == (126, "settling")
    assert "56 of 126 replicas are not there yet" in decision.reason


def test_by_chance_nothing_is_added():
    assert decide(scaler(), lack=0.05, demand=9.0).kind == "enough"


def test_the_maximum_and_the_bound_limit():
    limited = decide(scaler(maximum=110), lack=0.1, demand=20.0)
    assert limited.desired == 110
    full = decide(scaler(110, maximum=110), lack=0.1, demand=20.0)
    assert (full.desired, full.kind) == (110, "limit")
    assert "autoscale.max_replicas = 110" in full.reason
    bound = decide(scaler(groups=400), lack=0.1, demand=20.0)
    assert (bound.desired, bound.kind) == (100, "bound")


def test_nothing_is_added_for_what_is_over_before_it_helps():
    one = scaler()
    seen = Seen(replace(USUAL, lack=0.1, demand=20.0), 100, left=3)
    assert one.decide(2000.0, seen).kind == "ending"


def watch(one: Autoscaler, begin: float, seconds: float, **changes: object) -> list[int]:
    return [
        decide(one, now=begin + t, began=begin + t - 100.0, **changes).desired for t in range(0, int(seconds) + 1, 15)
    ]


def test_fewer_after_the_delay_to_the_highest_need_of_that_time():
    one = scaler()
    decide(one)
    watch(one, 2015.0, 200.0, demand=5.0)
    decide(one, now=2230.0, demand=7.0)
    numbers = watch(one, 2245.0, 90.0, demand=5.0)
    assert numbers == [100, 100, 100, 100, 74, 74, 74], "7 groups/s were needed within the delay"
    assert watch(one, 2345.0, 300.0, demand=5.0)[-1] == 53


def test_a_replica_that_is_held_back_is_not_taken_for_a_fast_one():
    one = scaler()
    decide(one)
    numbers = watch(one, 2015.0, 600.0, demand=5.0, rate=0.09, throttled=0.4)
    assert numbers[-1] == 53, "a busy one makes 0.1, not 0.15"


def test_without_a_busy_replica_seen_the_way_down_is_halved():
    one = scaler()
    assert watch(one, 2000.0, 300.0, demand=1.0, throttled=0.4)[-1] == 53


def test_too_few_to_be_worth_a_change():
    assert set(watch(scaler(), 2000.0, 900.0, demand=9.3)) == {100}
    assert watch(scaler(10), 2000.0, 300.0, demand=0.85)[-1] == 9


def test_never_below_the_minimum_and_never_zero():
    assert watch(scaler(10, minimum=4), 2000.0, 900.0, demand=0.01)[-1] == 4
    assert watch(scaler(10, minimum=0), 2000.0, 900.0, demand=0.001)[-1] == 1


def test_a_hold_keeps_the_number_and_the_delay_begins_anew():
    one = scaler()
    watch(one, 2000.0, 290.0, demand=5.0)
    held = one.decide(2295.0, Seen(USUAL, 100, hold="paused"))
    assert (held.desired, held.kind, held.reason) == (100, "hold", "paused")
    assert watch(one, 2310.0, 290.0, demand=5.0)[-1] == 100
    assert watch(one, 2610.0, 15.0, demand=5.0)[-1] == 53


def test_it_is_zero_when_the_job_is_over_and_as_before_when_it_goes_on():
    one = scaler()
    assert one.decide(2000.0, Seen(USUAL, 100, over="finished")).desired == 0
    assert one.decide(2015.0, Seen(None, 0)).desired == 100


BEGINNING = WarmUp(seconds=200.0, lacked=190.0, held=100, ready=100, lease_age=50.0)


def test_before_the_first_step_replicas_are_doubled_while_its_groups_take_long():
    one = scaler(10)
    first = one.decide(200.0, Seen(None, 10, BEGINNING))
    assert (first.desired, first.kind) == (20, "more")
    assert "1000 groups and has 100" in first.reason
    assert one.decide(215.0, Seen(None, 20, BEGINNING)).desired == 20, "the last ones have not shown yet"


@pytest.mark.parametrize(
    ("working", "beginning"),
    [
        (10, None),
        (9, BEGINNING),
        (10, replace(BEGINNING, ready=0)),
        (10, replace(BEGINNING, lacked=50.0)),
        (10, replace(BEGINNING, held=900)),
        (10, replace(BEGINNING, ready=700)),
        (10, replace(BEGINNING, seconds=100.0)),
    ],
)
def test_before_the_first_step_nothing_is_added_that_would_not_help(working, beginning):
    assert scaler(10).decide(200.0, Seen(None, working, beginning)).desired == 10


def test_a_person_decides_until_the_request_is_taken_back():
    one = scaler()
    assert one.request(2000.0, 7).desired == 7
    assert decide(one, now=2015.0, lack=0.5, demand=50.0).kind == "manual"
    with pytest.raises(ValueError, match=r"autoscale\.max_replicas = 1000"):
        one.request(2030.0, 1001)
    assert one.request(2045.0, None).desired == 7
    assert decide(one, now=2060.0, lack=0.5, demand=50.0).desired == 14


def test_starts_are_timed_by_who_leases_first():
    one = scaler()
    assert one.start_time == 60.0
    decide(one, lack=0.1, demand=11.0)  # 16 more
    one.joined(2100.0, 10)
    one.joined(2200.0, 6)
    assert one.memory.starts == [100.0, 200.0]
    one.joined(9000.0, 1)  # a replacement: nobody asked for it
    assert one.start_time == 150.0


def test_memory_survives_as_json_and_is_brought_within_new_limits():
    one = scaler()
    decide(one, lack=0.1, demand=11.0)
    one.request(2100.0, 40)
    record = json.loads(json.dumps(one.memory.to_record()))
    assert PastDecisions.from_record(record) == one.memory
    again = Autoscaler(replace(LIMITS, maximum=30), PastDecisions.from_record(record))
    assert (again.memory.desired, again.memory.manual) == (30, 30)
    assert decide(again, now=2200.0).desired == 30
