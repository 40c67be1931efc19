"""The launcher obeys a number of rollout replicas: who is started, and who has to leave."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.job.scaling import ReplicaChange, changes

NAMES = [f"rollout-{i}" for i in range(6)]
some = st.sets(st.sampled_from(NAMES))


def test_the_first_free_names_are_started() -> None:
    found = changes(4, NAMES, {"rollout-0", "rollout-2"}, set(), {})
    assert found == ReplicaChange(["rollout-1", "rollout-3"], [])


def test_who_holds_least_leaves_first_and_of_these_the_last() -> None:
    leases = {"rollout-0": 2, "rollout-1": 5, "rollout-2": 2}  # rollout-3 has not registered
    found = changes(1, NAMES, NAMES[:4], set(), leases)
    assert found == ReplicaChange([], ["rollout-3", "rollout-2", "rollout-0"])


def test_who_was_asked_to_leave_does_not_count_and_is_not_asked_again() -> None:
    assert changes(2, NAMES, NAMES[:3], {"rollout-1"}, {}) == ReplicaChange([], [])
    assert changes(3, NAMES, NAMES[:3], {"rollout-1"}, {}) == ReplicaChange(["rollout-3"], [])


@given(
    desired=st.integers(-2, 9),
    running=some,
    leaving=some,
    leases=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)),
)
def test_after_the_change_there_are_as_many_as_are_needed_or_fit(
    desired: int, running: set[str], leaving: set[str], leases: dict[str, int]
) -> None:
    leaving &= running
    found = changes(desired, NAMES, running, leaving, leases)
    staying = (running - leaving - {*found.end}) | {*found.start}
    room = len(NAMES) - len(leaving)
    assert len(staying) == min(max(desired, 0), room)
    assert not {*found.start} & running
    assert {*found.end} <= running - leaving
    assert not (found.start and found.end)
