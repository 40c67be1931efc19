from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_worker.errors import SampleTooLongError
from policy_worker.training.batches.cutting import Batching, MiniBatch, alike_of, plan_step, spared_tokens
from tests.support.effort import examples

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
RULES = st.builds(
    Batching,
    samples=st.integers(1, 7),
    max_tokens=st.none() | st.integers(60, 300),
    packed=st.booleans(),
    mini_batch=st.none() | st.integers(1, 12),
    passes=st.integers(1, 3),
    shuffle_seed=st.none() | st.integers(0, 3),
    balance=st.booleans(),
)


def trained_rows(plan: list[MiniBatch]) -> list[list[int]]:
    """The rows of each optimizer step, from its micro-batches on all ranks."""
    return [sorted(row for rank in piece.ranks for micro in rank for row in micro) for piece in plan]


def cost(rows: list[int], lengths: list[int], packed: bool) -> int:
    if not rows:
        return 0
    return sum(lengths[row] for row in rows) if packed else len(rows) * max(lengths[row] for row in rows)


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None)
@given(lengths=LENGTHS, data=st.data(), world=st.integers(1, 5), rule=RULES)
def test_every_cut_keeps_its_promises(lengths, data, world, rule):
    counts = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    groups = st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))
    alike = data.draw(st.none() | groups)
    plan = plan_step(lengths, counts, rule, data_ranks=world, alike=alike)

    # exactly once per iteration: each row that counts, and no other
    once = sorted(row for piece in trained_rows(plan) for row in piece)
    assert once == sorted([row for row in range(len(lengths)) if counts[row]] * rule.passes)
    assert trained_rows(plan) == [sorted(piece.rows) for piece in plan]

    for piece in plan:
        assert len(piece.ranks) == world
        assert len({len(rank) for rank in piece.ranks}) == 1  # collectives match
        for rank in piece.ranks:
            for micro in rank:
                if rule.max_tokens is None:
                    assert len(micro) <= rule.samples
                else:
                    assert cost(micro, lengths, rule.packed) <= rule.max_tokens

    # the same again, and the same optimizer steps for any number of ranks
    assert plan_step(lengths, counts, rule, data_ranks=world, alike=alike) == plan
    alone = plan_step(lengths, counts, rule, data_ranks=1, alike=alike)
    assert [piece.rows for piece in alone] == [piece.rows for piece in plan]


def test_pieces_follow_the_table_and_iterate():
    rule = Batching(samples=8, max_tokens=None, packed=False, mini_batch=4, passes=2)
    plan = plan_step([3] * 6, [True] * 6, rule, data_ranks=1)
    assert [piece.rows for piece in plan] == [[0, 1, 2, 3], [4, 5]] * 2


def test_a_piece_without_anything_that_counts_is_no_optimizer_step():
    rule = Batching(samples=8, max_tokens=None, packed=False, mini_batch=2)
    plan = plan_step([3] * 4, [False, False, True, True], rule, data_ranks=2)
    assert [piece.rows for piece in plan] == [[2, 3]]
    assert plan_step([], [], rule, data_ranks=2) == []


def test_samples_of_a_group_are_computed_together_where_their_prompts_weigh():
    groups, lengths, prompts = [0, 0, 0, 1, 1, 1], [9, 5, 7, 8, 6, 6], [2, 2, 2, 4, 4, 4]
    assert alike_of(groups, prompts, lengths, list(range(6)), 0.2) is groups
    assert alike_of(groups, prompts, lengths, [0, 3], 0.2) is None
    assert alike_of(groups, [1] * 6, [100] * 6, list(range(6)), 0.05) is None
    rule = Batching(samples=3, max_tokens=None, packed=False)

    def cut(rule: Batching, ranks: int = 1, alike: list[int] | None = groups) -> list[list[list[int]]]:
        (piece,) = plan_step(lengths, [True] * 6, rule, data_ranks=ranks, alike=alike)
        return piece.ranks

    assert cut(rule, alike=None) == [[[0, 3, 2], [4, 5, 1]]]
    assert cut(rule) == [[[0, 2, 1], [3, 4, 5]]]
    assert spared_tokens(cut(rule)[0], groups, prompts) == 2 * 2 + 4 * 2
    assert spared_tokens([[0, 3], [1, 2]], groups, prompts) == 2
    assert cut(replace(rule, max_tokens=18)) == [[[0, 2], [1, 3], [4, 5]]]
    assert cut(replace(rule, max_tokens=21, packed=True)) == [[[0, 2, 1], [3, 4, 5]]]
    assert cut(replace(rule, balance=True), 2) == [[[0, 4, 5]], [[3, 2, 1]]], "two groups do not balance two ranks"


def test_ranks_without_samples_get_empty_micro_batches():
    rule = Batching(samples=1, max_tokens=None, packed=False)
    (piece,) = plan_step([5, 4], [True, True], rule, data_ranks=3)
    assert sorted(len(rank) for rank in piece.ranks) == [1, 1, 1]
    assert sum(micro == [] for rank in piece.ranks for micro in rank) == 1


def test_balance_evens_out_tokens():
    lengths, rule = [50, 1, 50, 1, 50, 1, 50, 1], Batching(8, None, packed=True)

    def tokens(balance: bool) -> list[int]:
        (piece,) = plan_step(lengths, [True] * 8, replace(rule, balance=balance), data_ranks=4)
        return [sum(lengths[row] for micro in rank for row in micro) for rank in piece.ranks]

    assert max(tokens(balance=True)) == 51
    lengths = [50, 50, 50, 50, 1, 1, 1, 1]
    assert max(tokens(balance=False)) == 100
    assert max(tokens(balance=True)) == 51


def test_padding_counts_towards_the_cap():
    rule = Batching(samples=99, max_tokens=60, packed=False)
    (piece,) = plan_step([60, 10, 10, 10, 10, 10, 10], [True] * 7, rule, data_ranks=1)
    assert [len(micro) for micro in piece.ranks[0]] == [1, 6]


def test_packed_micro_batches_are_few_and_even():
    rule = Batching(samples=1, max_tokens=100, packed=True)
    (piece,) = plan_step([40, 40, 40, 40, 20, 20], [True] * 6, rule, data_ranks=1)
    assert [cost(micro, [40, 40, 40, 40, 20, 20], packed=True) for micro in piece.ranks[0]] == [100, 100]


def test_a_rank_that_needs_fewer_micro_batches_fills_as_many_evenly():
    lengths, rule = [60, 60, 60, 30, 30, 30, 30, 40], Batching(samples=1, max_tokens=100, packed=True)
    (piece,) = plan_step(lengths, [True] * 8, rule, data_ranks=2)
    assert [[cost(micro, lengths, packed=True) for micro in rank] for rank in piece.ranks] == [
        [90, 60, 60],
        [40, 60, 30],
    ]


def test_a_sample_beyond_the_cap_is_an_error_that_says_what_to_do():
    rule = Batching(samples=1, max_tokens=50, packed=True)
    with pytest.raises(SampleTooLongError, match=r"max_token_len_per_mini_batch = 50.*51 tokens.*model_max_length"):
        plan_step([51], [True], rule, data_ranks=1)
    assert plan_step([51], [False], rule, data_ranks=1) == []


def test_a_shuffle_deals_other_rows_in_each_pass_of_each_step():
    rule = Batching(samples=8, max_tokens=None, packed=False, mini_batch=4, passes=2, shuffle_seed=1)

    def rows(step: int, ranks: int = 1) -> list[list[int]]:
        return [piece.rows for piece in plan_step([3] * 12, [True] * 12, rule, data_ranks=ranks, step=step)]

    assert rows(0)[:3] != rows(0)[3:]
    assert rows(0) != rows(1)
    assert rows(1) == rows(1, ranks=3)
