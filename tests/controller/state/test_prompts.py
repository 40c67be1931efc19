from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.state.prompts import Permutation, Prompts
from schema.wire.prompts import PromptFile, PromptFileError, PromptWriter, write_prompts
from schema.wire.row_order import ordered

FROZEN = [2, 5, 3, 1, 6, 7, 9, 8, 4, 0]
EQUAL = [1, 4, 7, 5, 0, 3, 2, 6, 9, 8]


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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.text(max_size=5))
def test_rows_come_by_their_numbers_and_equal_ones_by_a_key(numbers: list[int], key: str) -> None:
    order = ordered(np.array(numbers, np.float64), key).tolist()
    assert sorted(order) == list(range(len(numbers)))
    assert [numbers[i] for i in order] == sorted(numbers)
    assert key or all(a < b for a, b in pairwise(order) if numbers[a] == numbers[b])


def test_the_order_of_equal_numbers_is_the_same_in_every_version_of_this_program() -> None:
    assert ordered(np.zeros(10), "42/1/10/math").tolist() == EQUAL


def test_a_column_orders_each_pass_of_each_source(tmp_path: Path) -> None:
    path, difficulty = tmp_path / "train.safetensors", [3.0, 1.0, 2.0, 9.0, 7.0, 1.0]
    with PromptWriter(path, sources=True) as writer:
        for i, number in enumerate(difficulty):
            writer.add(np.array([i + 1], np.int32), b"{}", None, "ab"[i > 2], number)
        writer.finish({})
    shares = {"a": 0.5, "b": 0.5}
    rising = Prompts(path, seed=3, shuffle=True, shares=shares, descending=False)
    falling = Prompts(path, seed=3, shuffle=False, descending=True)
    for data_pass in (0, 1):
        for source, rows in enumerate(([1, 2, 0], [5, 4, 3])):
            assert [rising.row_index(data_pass, position, source) for position in range(3)] == rows
        assert [falling.row_index(data_pass, position) for position in range(6)] == [3, 4, 0, 2, 1, 5]
    write_prompts(path, [[1]], [{}])
    with pytest.raises(PromptFileError, match="was prepared without"):
        Prompts(path, seed=3, shuffle=True, descending=False)


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


def write_grown(path: Path, rows: list[int], earlier: PromptFile | None = None, masks: bool = False) -> PromptFile:
    with PromptWriter(path, masks=masks) as writer:
        for row in rows:
            mask = np.array([row % 2, 1], np.uint8) if masks else None
            writer.add(np.array([row, row + 1], np.int32), b'{"row": %d}' % row, mask)
        writer.finish(writer.grown_from(earlier))
    return PromptFile(path)


def test_rows_that_come_later_leave_the_others_where_they_are(tmp_path: Path) -> None:
    file, orders = None, []
    for n in (5, 5, 9, 16):
        file = write_grown(tmp_path / f"{n}", list(range(n)), file)
        prompts = Prompts(tmp_path / f"{n}", seed=3, shuffle=True)
        orders.append([prompts.row_index(0, position) for position in range(n)])
    assert file is not None
    assert file.grown == [5, 9]
    assert orders[1] == orders[0] == [Permutation(5, 3, 0)(i) for i in range(5)]
    assert orders[2][:5] == orders[0]
    assert orders[3][:9] == orders[2]
    assert sorted(orders[3]) == list(range(16))
    assert orders[3][9:] != list(range(9, 16))


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1, 2, 4, 4, 5], [0, 1, 2, 5, 3, 5]])
def test_other_rows_are_not_those_of_an_earlier_file(tmp_path: Path, rows: list[int]) -> None:
    assert write_grown(tmp_path / "b", rows, write_grown(tmp_path / "a", list(range(5)))).grown == []
    same = write_grown(tmp_path / "c", [2, 4, 6], masks=True)
    assert write_grown(tmp_path / "d", [2, 4, 6, 8], same, masks=True).grown == [3]
    with PromptWriter(tmp_path / "e", masks=True) as writer:
        for row in (2, 4, 6, 8):
            writer.add(np.array([row, row + 1], np.int32), b'{"row": %d}' % row, np.array([1, 1], np.uint8))
        assert writer.grown_from(same) == {}, "what is learnt of them is something else"


def write_early(path: Path, n: int, early: int, *, unfinished: bool = False, masks: bool = False) -> None:
    """A file of the rows 0 … n − 1, of which so many were prepared first; every third is of source b."""
    with PromptWriter(path, sources=True, masks=masks) as writer:
        notes: dict[str, str] = {}
        for row in range(early if unfinished else n):
            notes = writer.early({"train": early}) if row == early else notes
            writer.add(np.array([row + 1], np.int32), b"{}", np.ones(1, np.uint8) if masks else None, "aab"[row % 3])
        notes = notes or writer.early({"train": early})
        writer.finish(notes | ({"unfinished": "true"} if unfinished else {}))


@pytest.mark.parametrize("shares", [{}, {"a": 0.5, "b": 0.5}], ids=str)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_first_pass_begins_with_the_rows_that_were_prepared_first(
    tmp_path: Path, shares: dict[str, float], shuffle: bool
) -> None:
    path, n, early = tmp_path / "rows", 30, 9
    write_early(path, n, early, unfinished=True)
    begun = Prompts(path, seed=3, shuffle=shuffle, shares=shares)
    assert (begun.counts.early, begun.counts.unfinished, begun.counts.grown, begun.replaced) == (9, True, (), False)
    write_early(path, n, early)
    whole = Prompts(path, seed=3, shuffle=shuffle, shares=shares)
    assert (whole.counts.early, whole.counts.unfinished, whole.counts.grown, begun.replaced) == (9, False, (9,), True)
    for k, (of_begun, of_whole) in enumerate(zip(begun.sources, whole.sources, strict=True)):
        assert (of_begun.rows, of_whole.early) == (of_whole.early, of_begun.rows), k
    rows = [(source.early, source.rows) for source in whole.sources] or [(early, n)]
    for source, (first, all_of_it) in enumerate(rows):
        passes = [[whole.row_index(p, at, source) for at in range(all_of_it)] for p in (0, 1)]
        assert [begun.row_index(0, at, source) for at in range(first)] == passes[0][:first]
        assert max(passes[0][:first]) < early <= min(passes[0][first:])
        assert sorted(passes[0]) == sorted(passes[1])
        assert shuffle == (max(passes[1][:first]) >= early), "a later pass shuffles all rows"
