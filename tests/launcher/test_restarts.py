"""The restart policy, driven by plain values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.restarts import EndJob, Left, Restart, RestartBudget, Restarts, Role, describe_exit, is_crash

BUDGET = RestartBudget(max_restarts=3, backoff=1.0, backoff_max=5.0, healthy_after=100.0)


def exited(restarts: Restarts, now: float, code: int, over: bool = False, needed: bool = True) -> object:
    return restarts.exited(now, code, over=over, needed=needed)


def test_back_off_doubles_up_to_its_limit_and_the_budget_ends_the_job():
    restarts = Restarts("rollout-0", Role.ROLLOUT, BUDGET)
    delays = []
    for _ in range(3):
        restarts.started(0.0)
        verdict = exited(restarts, 1.0, 1)
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay)
    restarts.started(0.0)
    end = exited(restarts, 1.0, 137)
    assert delays == [1.0, 2.0, 4.0]
    assert isinstance(end, EndJob)
    assert end.exit_code == 1
    assert "rollout-0" in end.reason
    assert "SIGKILL" in end.reason
    assert "launcher.max_restarts = 3" in end.reason
    assert restarts.total == 3


def test_a_healthy_stretch_begins_a_new_streak():
    restarts = Restarts("policy-0", Role.POLICY, BUDGET)
    for now in range(0, 1000, 200):
        restarts.started(now)
        verdict = exited(restarts, now + 100.0, 1)
        assert verdict == Restart(1.0, 1, 3, "exit code 1")
    assert restarts.total == 5


ENDS = [
    *((role, 2, 2, ("configuration",)) for role in Role),
    (Role.POLICY, 4, 1, ("no checkpoint", "train.ckpt.enable_checkpoint")),
    (Role.CONTROLLER, 3, 1, ("another controller",)),
    (Role.DATA, 1, 1, ()),
]


@pytest.mark.parametrize(("role", "code", "exit_code", "words"), ENDS)
def test_an_end_that_no_restart_can_help_ends_the_job_by_name(
    role: Role, code: int, exit_code: int, words: tuple[str, ...]
):
    verdict = exited(Restarts("it", role, BUDGET), 0.0, code)
    assert isinstance(verdict, EndJob)
    assert verdict.exit_code == exit_code
    assert all(word in verdict.reason for word in words)


@pytest.mark.parametrize(
    ("role", "code"), [(Role.ROLLOUT, 4), (Role.POLICY, 5), (Role.REDIS, 3), (Role.DATA, 128 + 9)]
)
def test_what_the_code_means_for_another_role_is_restarted(role: Role, code: int):
    assert isinstance(exited(Restarts("it", role, BUDGET), 0.0, code), Restart)


def test_a_name_that_another_replica_took_costs_no_budget():
    restarts = Restarts("rollout-0", Role.ROLLOUT, BUDGET)
    for _ in range(BUDGET.max_restarts + 1):
        restarts.started(0.0)
        verdict = exited(restarts, 1.0, 5)
        assert verdict == Restart(1.0, 0, 3, "another replica lives under its name")


def test_leaving_in_order():
    assert exited(Restarts("rollout-0", Role.ROLLOUT, BUDGET), 0.0, 0, needed=False) == Left()
    assert exited(Restarts("data", Role.DATA, BUDGET), 0.0, 0) == Left(), "they are prepared"
    assert exited(Restarts("policy-1", Role.POLICY, BUDGET), 0.0, 6) == Left(), "the others refuse this trainer"
    missed = exited(Restarts("policy-0", Role.POLICY, BUDGET), 0.0, 0, needed=True)
    assert isinstance(missed, Restart)
    assert "still needs it" in missed.reason


def test_a_replica_that_was_drained_and_is_the_last_one_costs_nothing_of_the_budget():
    restarts = Restarts("rollout-0", Role.ROLLOUT, BUDGET)
    exited(restarts, 0.0, 137)
    for _ in range(2 * BUDGET.max_restarts):
        restarts.started(0.0)
        verdict = exited(restarts, 1.0, 0)
        assert verdict == Restart(1.0, 0, 3, "it left in order and is the last one")
    assert (restarts.streak, restarts.total) == (1, 1 + 2 * BUDGET.max_restarts)


def test_a_row_is_over_as_soon_as_the_replica_is_healthy():
    restarts = Restarts("policy-0", Role.POLICY, BUDGET)
    exited(restarts, 0.0, 1)
    restarts.started(10.0)
    assert restarts.in_a_row(109.9) == 1
    assert restarts.in_a_row(110.0) == 0, "the next end begins a new one"


@given(code=st.integers(0, 255), role=st.sampled_from(list(Role)))
def test_nothing_is_restarted_or_blamed_once_the_job_is_over(code: int, role: Role):
    assert exited(Restarts("it", role, BUDGET), 0.0, code, over=True) == Left()


@given(
    limit=st.integers(0, 6),
    backoff=st.floats(0, 10),
    most=st.floats(10, 100),
    codes=st.lists(st.sampled_from([1, 137, 143, 255]), min_size=10, max_size=20),
)
def test_a_streak_never_restarts_more_often_than_allowed(limit: int, backoff: float, most: float, codes: list[int]):
    restarts = Restarts("rollout-0", Role.ROLLOUT, RestartBudget(limit, backoff, most))
    verdicts = []
    for code in codes:
        restarts.started(0.0)
        verdicts.append(exited(restarts, 0.0, code))
        if isinstance(verdicts[-1], EndJob):
            break
    assert isinstance(verdicts[-1], EndJob)
    assert len(verdicts) == limit + 1
    delays = [verdict.delay for verdict in verdicts if isinstance(verdict, Restart)]
    assert delays == sorted(delays)
    assert all(delay <= most for delay in delays)


def test_an_end_that_is_nobodys_fault_costs_nothing():
    restarts = Restarts("policy-0", Role.POLICY, RestartBudget(0, 1.0, 1.0))
    for _ in range(5):
        restarts.started(0.0)
        verdict = restarts.exited(0.0, 1, over=False, needed=True, counts=False)
        assert verdict == Restart(0.0, 0, 0, "exit code 1")
    assert restarts.total == 0
    assert isinstance(restarts.exited(0.0, 2, over=False, needed=True, counts=False), EndJob)


def test_delays_stay_finite_for_any_number_of_attempts():
    assert RestartBudget(10**6, 1.0, 60.0).delay(100_000) == 60.0
    assert RestartBudget(10**6, 0.0, 60.0).delay(100_000) == 0.0


def test_exit_codes_in_words():
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(143) == "killed by SIGTERM"
    assert describe_exit(137) == "killed by SIGKILL"
    assert describe_exit(255) == "exit code 255"


@pytest.mark.parametrize(
    ("code", "crash"), [(0, False), (1, True), (134, True), (139, True), (129, False), (137, False), (143, False)]
)
def test_what_was_killed_from_outside_has_not_crashed(code: int, crash: bool):
    assert is_crash(code) is crash
