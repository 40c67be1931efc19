"""Decisions of the worker loop, driven with numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.groups.leasing import BACKLOG, MAX_GROUPS, groups_to_lease
from rollout_worker.groups.pushing import cut_batch
from rollout_worker.shutdown import leaving_times

COUNTS = st.integers(0, 5000)
SIZES = st.integers(1, 600)


@given(in_engine=COUNTS, held=COUNTS, capacity=SIZES, group_size=SIZES, batch_size=SIZES)
def test_a_lease_fits_and_an_engine_never_starves(
    in_engine: int, held: int, capacity: int, group_size: int, batch_size: int
) -> None:
    asked = groups_to_lease(
        in_engine=in_engine, held=held, capacity=capacity, group_size=group_size, batch_size=batch_size
    )
    assert 0 <= asked <= MAX_GROUPS
    assert asked == 0 or in_engine == 0 or in_engine + asked * group_size <= capacity
    if held >= BACKLOG * max(capacity, group_size):
        assert asked == 0
    elif in_engine == 0 or capacity - in_engine >= max(0.25 * capacity, group_size):
        assert asked >= 1


def test_batch_size_keeps_requests_large() -> None:
    def ask(in_engine: int, batch_size: int) -> int:
        return groups_to_lease(in_engine=in_engine, held=in_engine, capacity=128, group_size=8, batch_size=batch_size)

    assert [ask(n, 1) for n in (0, 64, 112, 120, 121, 128)] == [16, 8, 2, 1, 0, 0]
    assert [ask(n, 2) for n in (0, 64, 112, 120, 121, 128)] == [16, 8, 2, 0, 0, 0]
    assert [ask(n, 16) for n in (0, 64, 96, 97, 112, 128)] == [16, 8, 4, 0, 0, 0]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 500), st.integers(1, 20))
def test_a_batch_is_never_empty_and_within_its_limits(sizes: list[int], max_bytes: int, most: int) -> None:
    count = cut_batch(sizes, max_bytes, most)
    assert 1 <= count <= min(len(sizes), most)
    assert count == 1 or sum(sizes[:count]) <= max_bytes
    if count < min(len(sizes), most):
        assert sum(sizes[: count + 1]) > max_bytes


@given(st.floats(0.1, 1e5))
def test_leaving_fits_into_its_time_with_some_for_closing(shutdown_timeout: float) -> None:
    times = leaving_times(shutdown_timeout)
    assert min(times.finish, times.push, times.goodbye) > 0
    assert times.finish + times.push + times.goodbye <= 0.9 * shutdown_timeout
    assert times.finish >= 0.5 * shutdown_timeout
