from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.state.prompts import Permutation, Prompts
from schema.wire.prompts import write_prompts

FROZEN = [2, 5, 3, 1, 6, 7, 9, 8, 4, 0]


@given(n=st.integers(1, 400), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_every_epoch_goes_through_all_rows_once(n: int, seed: int, epoch: int) -> None:
    permutation = Permutation(n, seed, epoch)
    assert sorted(permutation(i) for i in range(n)) == list(range(n))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    orders = {
        (seed, epoch): tuple(Permutation(1000, seed, epoch)(i) for i in range(1000))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9
    assert orders[1, 2] == tuple(Permutation(1000, 1, 2)(i) for i in range(1000))


def test_the_order_is_the_same_in_every_version_of_this_program() -> None:
    """A stored job goes on with the same order after an upgrade."""
    assert [Permutation(10, 42, 0)(i) for i in range(10)] == FROZEN


def test_neighbours_are_spread_out() -> None:
    """Shuffled rows are uncorrelated with their positions: |r| of 10,000 rows is below 4 standard errors."""
    n = 10_000
    rows = [Permutation(n, 7, 0)(i) for i in range(n)]
    mean = (n - 1) / 2
    covariance = sum((i - mean) * (row - mean) for i, row in enumerate(rows)) / n
    variance = (n * n - 1) / 12
    assert abs(covariance / variance) < 0.04


def test_a_position_outside_of_the_epoch_is_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0, 0)(5)


def test_rows_are_read_at_their_positions(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write_prompts(path, [[i, i + 1] for i in range(1, 8)], [{"row": i} for i in range(7)])
    plain = Prompts(path, seed=3, shuffle=False)
    assert plain.get(5, 2) == ([3, 4], {"row": 2})
    shuffled = Prompts(path, seed=3, shuffle=True)
    assert len(shuffled) == 7
    for epoch in (0, 1, 0):
        got = [shuffled.get(epoch, position) for position in range(7)]
        assert sorted(row["row"] for _, row in got) == list(range(7))
        assert all(ids == [row["row"] + 1, row["row"] + 2] for ids, row in got)
        assert [row["row"] for _, row in got] == [Permutation(7, 3, epoch)(i) for i in range(7)]
