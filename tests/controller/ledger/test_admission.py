"""Admission against brute force: schedulable means that some assignment of groups to steps exists."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ledger.admission import Admission, Lag, tightest_prefix
from controller.ledger.values import LedgerParams
from tests.support.ledger import schedulable


def exists_assignment(deadlines: list[int], first_step: int, slots: int) -> bool:
    """Try every assignment of groups to steps."""
    if any(deadline < first_step for deadline in deadlines):
        return False
    choices = [range(first_step, deadline + 1) for deadline in deadlines]
    return any(max(Counter(steps).values(), default=0) <= slots for steps in product(*choices))


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 2), st.integers(1, 3))
def test_schedulable_is_exact(deadlines: list[int], first_step: int, slots: int) -> None:
    assert schedulable(Counter(deadlines), first_step, slots) == exists_assignment(deadlines, first_step, slots)


def test_tightest_prefix_is_the_first_step_that_overflows() -> None:
    assert tightest_prefix(Counter({5: 2, 6: 2}), first_step=5, slots=2) is None
    assert tightest_prefix(Counter({5: 2, 6: 3}), first_step=5, slots=2) == 6
    assert tightest_prefix(Counter({4: 1}), first_step=5, slots=2) == 4
    assert tightest_prefix(Counter({4: 0}), first_step=5, slots=2) is None


PARAMS = LedgerParams(groups_per_step=2, n_samples=1, staleness_bound=2, n_positions=1)


def admission(**changes: object) -> Admission:
    facts: dict[str, object] = {
        "params": PARAMS, "committed": 10, "first_step": 10, "lag": 0,
        "deadlines": Counter(), "published_version": 10,
    }  # fmt: skip
    return Admission(**{**facts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "version", "update", "says"),
    [
        pytest.param({"deadlines": Counter({10: 2, 11: 2, 12: 2})}, 10, False, "6 groups are outstanding", id="full"),
        pytest.param({}, 7, True, "load version 10", id="an old version"),
        pytest.param(
            {"params": replace(PARAMS, staleness_bound=0), "first_step": 11},
            10,
            False,
            "wait for version 11",
            id="on policy",
        ),
        pytest.param({"deadlines": Counter({10: 2})}, 8, True, "", id="only early slots are taken"),
    ],
)
def test_a_refusal_says_whether_updating_helps(
    facts: dict[str, object], version: int, update: bool, says: str
) -> None:
    refusal = admission(**facts).decide(version)
    assert refusal is not None
    assert refusal.update is update
    assert says in refusal.reason


def test_a_laggard_is_refused_only_while_others_can_fill_the_step() -> None:
    crowd = Counter({12: 2})
    assert admission(lag=1, deadlines=crowd).decide(8) is not None
    assert admission(lag=1, deadlines=Counter({12: 1})).decide(8) is None
    assert admission(lag=1, deadlines=crowd).decide(9) is None


def test_the_newest_version_is_never_a_laggard() -> None:
    """Inside a sync interval of 3 the newest version is two steps old: lag must not refuse it."""
    inside = admission(lag=2, published_version=8, deadlines=Counter({12: 2}))
    assert inside.effective_lag() == 0
    assert inside.decide(8) is None


def test_lag_is_the_median_of_recent_groups() -> None:
    lag = Lag()
    assert lag.typical() == 0
    for steps in (0, 3, 1, -1, 2):
        lag.observe(steps)
    assert lag.typical() == 1
