"""Victims and moments: the same for the same seed, and all roles in their turn."""

from __future__ import annotations

import signal
from collections import Counter
from itertools import islice

import pytest

from tests.chaos.plan import DELAYS, FOR_GOOD, KEPT, MOMENTS, ROLES, SIGNALS, JobPlan, plan


def jobs(seed: int, count: int, **options: int) -> list[JobPlan]:
    found = plan(seed, options.get("kills", 100), ROLES, options.get("per_job", 8))
    return list(islice(found, count))


def test_a_seed_is_a_plan() -> None:
    assert jobs(7, 20) == jobs(7, 20)
    assert jobs(7, 20) != jobs(8, 20)


@pytest.mark.parametrize("seed", range(5))
def test_roles_take_turns_and_moments_vary(seed: int) -> None:
    strikes = [strike for job in jobs(seed, 40) for strike in job.strikes]
    counts = Counter(strike.role for strike in strikes)
    assert set(counts) == set(ROLES)
    assert max(counts.values()) - min(counts.values()) <= 1, "decks of all roles, one after the other"
    moments = Counter(strike.moment for strike in strikes)
    assert set(moments) == {"start", "finish", *(moment for moment, _ in MOMENTS)}
    assert any(strike.keeper for strike in strikes)
    assert all(strike.role in KEPT for strike in strikes if strike.keeper)
    stopped = [strike for strike in strikes if strike.stop]
    assert {strike.role for strike in stopped} == set(ROLES)
    assert {strike.role for strike in stopped if strike.stop == FOR_GOOD} == KEPT
    assert any(strike.keeper for strike in stopped)
    numbers = Counter(strike.number for strike in strikes if not strike.stop)
    assert set(numbers) == {signal.SIGKILL, *SIGNALS}
    assert numbers[signal.SIGKILL] > 2 * sum(numbers[number] for number in SIGNALS), "kills stay the bulk"
    assert sum(strike.moment == "after" and strike.delay < 1.0 for strike in strikes) > 10, "double faults"
    for strike in strikes:
        assert 0.0 <= strike.delay <= DELAYS.get(strike.moment, 8.0)
        assert 0.0 <= strike.choice < 1.0


def test_the_preparation_of_the_data_is_struck_first() -> None:
    for job in jobs(3, 20):
        roles = [strike.role for strike in job.strikes]
        assert roles == sorted(roles, key=lambda role: role != "data")
        assert all(strike.moment == "start" for strike in job.strikes if strike.role == "data")


def test_a_job_has_no_more_strikes_than_are_wanted() -> None:
    (job,) = jobs(1, 1, kills=3)
    assert len(job.strikes) == 3
