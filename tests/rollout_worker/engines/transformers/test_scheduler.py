"""Decisions of the embedded engine, driven with numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engines.transformers.scheduler import (
    CacheCapacity,
    QueuedRequest,
    SecondsPerUnit,
    admit,
    admit_alone,
    let_running_end,
)

WAITING = st.lists(st.builds(QueuedRequest, st.integers(1, 40), st.integers(2, 500)), max_size=12)


@given(WAITING, st.integers(0, 64), st.integers(2, 500), st.integers(1, 64), st.integers(500, 40_000))
def test_what_begins_is_a_prefix_that_fits(
    waiting: list[QueuedRequest], running: int, longest: int, slots: int, tokens: int
) -> None:
    running = min(running, slots)
    granted = admit(waiting, running, longest if running else 0, CacheCapacity(slots, tokens))
    assert len(granted) <= len(waiting)
    assert all(0 < count <= entry.samples for count, entry in zip(granted, waiting, strict=False))
    assert all(count == entry.samples for count, entry in zip(granted[:-1], waiting, strict=False))
    rows = running + sum(granted)
    assert rows <= slots
    widest = max([longest if running else 0, *(entry.longest for entry in waiting[: len(granted)])])
    assert not granted or rows * widest <= tokens or rows == 1
    if waiting and not running:
        assert granted, "an empty engine begins something"


def test_waves_are_collected_unless_everything_fits() -> None:
    capacity = CacheCapacity(100, 10**6)
    eight = [QueuedRequest(8, 50)] * 4
    assert admit(eight, 90, 50, capacity) == []
    assert admit(eight, 76, 50, capacity) == []
    assert admit(eight, 75, 50, capacity) == [8, 8, 8, 1]
    assert admit(eight, 60, 50, capacity) == [8, 8, 8, 8]
    assert admit(eight[:1], 92, 50, capacity) == [8]


def test_an_update_waits_only_while_that_is_cheap() -> None:
    assert let_running_end(10, 0.001, 1000, 0.001)
    assert not let_running_end(5000, 0.001, 1000, 0.001)
    assert not let_running_end(10, 0.001, 0, 0.001)
    assert not let_running_end(10, 0.001, 1000, 0.0), "nothing measured yet"
    assert let_running_end(100, 0.001, 50, 0.001, patience=2.0)
    assert not let_running_end(101, 0.001, 50, 0.001, patience=2.0)


def test_speed_follows_what_it_sees() -> None:
    speed = SecondsPerUnit()
    assert speed.seconds == 0.0
    speed.observe(2.0, 4)
    assert speed.seconds == 0.5
    for _ in range(100):
        speed.observe(1.0, 10)
    assert abs(speed.seconds - 0.1) < 1e-3


def test_alone_only_the_first_begins_and_only_in_an_empty_engine() -> None:
    capacity = CacheCapacity(8, 10**6)
    assert admit_alone([QueuedRequest(4, 50), QueuedRequest(4, 50)], 0, capacity) == [4]
    assert admit_alone([QueuedRequest(20, 50)], 0, capacity) == [8]
    assert admit_alone([QueuedRequest(4, 50)], 1, capacity) == []
    assert admit_alone([], 0, capacity) == []
