from __future__ import annotations

import pytest
import torch

from policy_worker.algorithms.aggregation import StepTotals, token_weights

LENGTHS = torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])  # a sample of two tokens and one of three
TOTALS = StepTotals(tokens=5, samples=2)


def test_token_mean():
    assert token_weights("token-mean", LENGTHS, TOTALS).tolist() == pytest.approx([0.2] * 5)


def test_sum_over_each_sequence():
    assert token_weights("seq-mean-token-sum", LENGTHS, TOTALS).tolist() == [0.5] * 5


def test_mean_over_each_sequence():
    expected = [1 / 4] * 2 + [1 / 6] * 3
    assert token_weights("seq-mean-token-mean", LENGTHS, TOTALS).tolist() == pytest.approx(expected)


def test_constant_divisor_instead_of_the_length():
    weights = token_weights("seq-mean-token-mean", LENGTHS, TOTALS, max_tokens=10)
    assert weights.tolist() == pytest.approx([1 / 20] * 5)


def test_nothing_to_count_divides_by_nothing():
    weights = token_weights("token-mean", torch.zeros(0), StepTotals(tokens=0, samples=0))
    assert weights.tolist() == []
