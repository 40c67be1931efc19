"""When replicas that wait for each other begin anew, with a clock of numbers."""

from __future__ import annotations

from controller.state.job_facts import LEAP, first_number
from controller.state.standstill import FIRST_S, MOST_S, RECENT_S, Standstill


def waits(found: Standstill, names: str, begin: float, end: float) -> float | None:
    """These all wait and poll; the second in which it is over."""
    for now in range(int(begin), int(end)):
        for name in names:
            found.heard(name, now, waits=True)
        if found.is_over(names, now):
            return now
    return None


def test_the_limit_counts_while_all_wait_and_doubles_without_a_step():
    found = Standstill()
    found.at(4)
    ends, now = [], 0.0
    for _ in range(4):
        over = waits(found, "ab", now, now + 100)
        assert over is not None
        ends.append(over - now)
        now = over + 1
    assert ends == [FIRST_S, 2 * FIRST_S, MOST_S, MOST_S]
    found.at(5)
    assert waits(found, "ab", now, now + 100) == now + FIRST_S


def test_whoever_is_busy_silent_or_not_known_stops_the_clock():
    found = Standstill()
    assert waits(found, "a", 0, 14) is None
    assert found.since("ab", 14) is None, "nothing is known of b, as after a restart"
    found.heard("b", 14, waits=False)
    assert found.since("ab", 14) is None, "b computes"
    found.heard("b", 14, waits=True)
    assert found.since("ab", 14) == 14
    assert found.since("ab", 14 + RECENT_S) is None, "a was not heard of for too long"
    for name in "ab":
        found.heard(name, 14, waits=True, for_s=50.0)
    assert found.since("ab", 60) == 14, "both calls are still open"
    found.heard("a", 70, waits=True)
    found.heard("b", 80, waits=True)
    assert found.since("ab", 80) == 80, "b may have done anything in between"
    assert found.since("", 70) is None


def test_numbers_after_a_restart_are_above_all_that_may_be_forgotten():
    assert first_number(7, wall=1000.0) == 7 + LEAP, "the clock was set back"
    assert first_number(7, wall=1e9) == 10**12
