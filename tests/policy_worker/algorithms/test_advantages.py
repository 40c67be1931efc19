from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_worker.algorithms.advantages import ESTIMATORS, estimator, estimator_of, grpo, sample_advantages
from policy_worker.errors import SettingsError
from tests.support.effort import examples


def test_grpo_by_hand():
    # scores 1, 0, 0, 1: mean 0.5, squares sum to 1, unbiased variance 1/3
    std = math.sqrt(1 / 3)
    assert grpo([[1, 0, 0, 1]]) == [pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6)] * 1 + [
        -0.5 / (std + 1e-6), 0.5 / (std + 1e-6)], rel=1e-12)]  # fmt: skip


def test_a_group_of_one_has_mean_zero_and_deviation_one():
    assert grpo([[0.75]]) == [pytest.approx([0.75 / (1 + 1e-6)], rel=1e-12)]
    assert grpo([[0.75]], unbiased=True) == [[0.75]]


def test_equal_scores_give_no_advantage():
    assert grpo([[0.3] * 5]) == [[0.0] * 5]


def test_unbiased_leaves_out_the_division():
    assert grpo([[3, 1]], unbiased=True) == [[1.0, -1.0]]
    assert grpo([[3, 1]])[0][0] == pytest.approx(1 / math.sqrt(2), rel=1e-5)


@pytest.mark.scaled
@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=8), max_size=4),
    st.booleans(),
)
def test_agrees_with_numpy(groups: list[list[float]], unbiased: bool):
    for scores, found in zip(groups, grpo(groups, unbiased), strict=True):
        x = np.array(scores)
        expected = x - x.mean()
        if not unbiased:
            expected = expected / (x.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_failed_samples_take_no_part_in_their_group():
    scores, group = [1.0, None, 0.0, None, 5.0], [0, 0, 0, 1, 2]
    found = sample_advantages(scores, group, estimator_of("grpo"), unbiased=True)
    assert found == [0.5, 0.0, -0.5, 0.0, 5.0]


def test_order_of_samples_does_not_matter():
    scores, group = [1.0, 2.0, 4.0, 0.0, 3.0], [0, 1, 0, 1, 0]
    straight = sample_advantages(scores, group, grpo, False)
    order = [4, 2, 0, 3, 1]
    shuffled = sample_advantages([scores[i] for i in order], [group[i] for i in order], grpo, False)
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-12)


def test_an_estimator_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"advantage_estimator = 'below_best' is not .* known are grpo"):
        estimator_of("below_best")
    monkeypatch.setitem(ESTIMATORS, "below_best", grpo)  # so that it is gone after the test

    @estimator("below_best")
    def below_best(groups, unbiased):
        return [[reward - max(rewards) for reward in rewards] for rewards in groups]

    assert sample_advantages([1.0, 3.0], [0, 0], estimator_of("below_best"), False) == [-2.0, 0.0]
