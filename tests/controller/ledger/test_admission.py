"""Admission against brute force: schedulable means that some assignment of groups to steps exists."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from controller.ledger.admission import Admission, Lag, tightest_prefix
from tests.support.ledger import schedulable


def exists_assignment(deadlines: list[int], first_step: int, slots: int) -> bool:
    """Try every assignment of groups to steps."""
    if any(deadline < first_step for deadline in deadlines):
        return False
    choices = [range(first_step, deadline + 1) for deadline in deadlines]
    return any(max(Counter(steps).values(), default=0) <= slots for steps in product(*choices))


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 2), st.integers(1, 3))
def test_schedulable_is_exact(deadlines: list[int], first_step: int, slots: int) -> None:
    assert schedulable(Counter(deadlines), first_step, slots) == exists_assignment(
        deadlines, first_step, slots
    )


def test_tightest_prefix_is_the_first_step_that_overflows() -> None:
    assert tightest_prefix(Counter({5: 2, 6: 2}), first_step=5, slots=2) is None
    assert tightest_prefix(Counter({5: 2, 6: 3}), first_step=5, slots=2) == 6
    assert tightest_prefix(Counter({4: 1}), first_step=5, slots=2) == 4
    assert tightest_prefix(Counter({4: 0}), first_step=5, slots=2) is None


def admission(**changes: object) -> Admission:
    facts: dict[str, object] = {
        "committed": 10,
        "first_step": 10,
        "bound": 2,
        "groups_per_step": 2,
        "slots": 2,
        "deadlines": Counter(),
        "lag": 0,
        "published_version": 10,
    }
    return Admission(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_full_window_is_refused_and_updating_would_not_help() -> None:
    refusal = admission(deadlines=Counter({10: 2, 11: 2, 12: 2})).decide(12)
    assert refusal is not None
    assert not refusal.update
    assert "6 groups are outstanding" in refusal.reason


def test_an_old_version_is_told_to_update() -> None:
    refusal = admission().decide(9)
    assert refusal is not None
    assert refusal.update
    assert "load version 10" in refusal.reason


def test_on_policy_waits_for_the_version_of_the_running_step() -> None:
    busy = admission(bound=0, first_step=11, published_version=10)
    refusal = busy.decide(10)
    assert refusal is not None
    assert not refusal.update
    assert "wait for version 11" in refusal.reason


def test_a_laggard_is_refused_only_while_others_can_fill_the_step() -> None:
    crowd = Counter({12: 2})
    assert admission(lag=1, deadlines=crowd).decide(10) is not None
    assert admission(lag=1, deadlines=Counter({12: 1})).decide(10) is None
    assert admission(lag=1, deadlines=crowd).decide(11) is None


def test_the_newest_version_is_never_a_laggard() -> None:
    """Inside a sync interval of 3 the newest version is two steps old: lag must not refuse it."""
    inside = admission(lag=2, published_version=8, deadlines=Counter({12: 2}))
    assert inside.effective_lag() == 0
    assert inside.decide(10) is None


def test_updating_helps_where_only_early_slots_are_taken() -> None:
    refusal = admission(deadlines=Counter({10: 2}), published_version=10).decide(10)
    assert refusal is not None
    assert refusal.update


def test_lag_is_the_median_of_recent_groups() -> None:
    lag = Lag()
    assert lag.typical() == 0
    for steps in (0, 3, 1, -1, 2):
        lag.observe(steps)
    assert lag.typical() == 1
