"""Schedules of a pipeline: everything once, in an order that can be, with few activations and short waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_worker.parallel.pipeline_schedule import Action, Name, Pipe, Tick

PIPES = st.builds(Pipe, st.integers(2, 6), st.integers(1, 3), st.sampled_from(["1F1B", "GPipe"]))


def most_open(schedule: list[Tick], rank: int) -> int:
    """Forwards of a rank that wait for their backward at once."""
    now = most = 0
    for action in (tick[rank] for tick in schedule):
        if action is not None:
            now += -1 if action.backward else 1
            most = max(most, now)
    return most


@given(PIPES, st.integers(1, 20), st.booleans())
def test_everything_is_done_once_after_what_it_needs(pipe: Pipe, batches: int, learns: bool):
    ended: dict[Action, int] = {}
    for number, tick in enumerate(pipe.schedule(batches, learns=learns)):
        for rank, action in enumerate(tick):
            if action is None:
                continue
            assert action not in ended
            assert action.stage % pipe.ranks == rank
            before = action._replace(stage=action.stage + (1 if action.backward else -1))
            if 0 <= before.stage < pipe.stages:
                assert ended[before] < number
                assert pipe.needing(before) == action
            if action.backward:
                assert ended[action._replace(backward=False)] < number
            ended[action] = number
    assert len(ended) == pipe.stages * batches * (2 if learns else 1)


@given(st.integers(2, 6), st.integers(1, 20))
def test_1f1b_keeps_few_activations_and_gpipe_all(ranks: int, batches: int):
    schedule = Pipe(ranks).schedule(batches)
    everything = Pipe(ranks, name="GPipe").schedule(batches)
    for rank in range(ranks):
        assert most_open(schedule, rank) == min(batches, ranks - rank)
        assert most_open(everything, rank) == batches


@pytest.mark.parametrize(
    ("ranks", "chunks", "batches", "name"),
    [(2, 1, 8, "1F1B"), (4, 1, 8, "1F1B"), (4, 1, 8, "GPipe"), (2, 2, 8, "1F1B"), (4, 2, 8, "1F1B")],
)
def test_full_rounds_wait_no_longer_than_filling_and_emptying_takes(
    ranks: int, chunks: int, batches: int, name: Name
):
    """2 (p − 1) ticks, of which one with more stages on a rank is the shorter (arXiv 2104.04473)."""
    schedule = Pipe(ranks, chunks, name).schedule(batches)
    assert len(schedule) == 2 * batches * chunks + 2 * (ranks - 1)
