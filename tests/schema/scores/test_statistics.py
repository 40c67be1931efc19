from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.scores.answers import LONGEST_ANSWER, shown, vote
from schema.scores.statistics import intervals, majority, means, pass_at_k, powers
from schema.scores.summary import ScoredPrompt, estimates_of, summarise


@given(st.integers(1, 4000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_closed_form(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-9, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_draws(passes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passes)))
    draws = list(combinations(passes, k))
    assert pass_at_k(len(passes), sum(passes), k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_of_too_few_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 of 1 answers that pass among 4"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(("n", "ks"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_ks_are_powers_of_two_and_n(n: int, ks: list[int]) -> None:
    assert powers(n) == ks


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_the_majority_is_what_drawing_among_the_tied_gives(samples: list[tuple[str | None, float]]) -> None:
    answers, scores = [answer for answer, _ in samples], [score for _, score in samples]
    voting = [answer for answer in answers if answer is not None]
    # Every sample that gave a most frequent answer is equally likely to be shown.
    shown = [s for a, s in samples if a is not None and voting.count(a) == max(map(voting.count, voting))] or scores
    assert majority(answers, scores) == pytest.approx(sum(shown) / len(shown))


@pytest.mark.parametrize(
    ("answer", "votes"),
    [
        ("1,200.0", "1200"), ("$1200", "1200"), ("-0.0", "0"), (" x + 1", "x+1"), ("1/2", "1/2"), ("007", "7"),
        ("9" * 40 + ".50", "9" * 40 + ".5"), ("B", "B"),
    ],
)  # fmt: skip
def test_answers_that_are_the_same_number_are_one_vote(answer: str, votes: str) -> None:
    assert vote(answer) == votes


def test_long_answers_stay_different() -> None:
    first, second = shown("x" * 5000 + "1"), shown("x" * 5000 + "2")
    assert first != second
    assert first is not None
    assert len(first) == LONGEST_ANSWER
    assert shown(" \n") is None


def test_no_samples_have_no_majority() -> None:
    assert majority([], []) is None


def test_intervals_cover_the_truth_as_often_as_they_claim() -> None:
    """60 prompts of different difficulty, 8 answers to each: resampled prompts know that answers depend."""
    generator, covered, narrow = np.random.default_rng(1), 0, 0
    for trial in range(400):
        difficulty = generator.beta(0.6, 0.4, size=60)
        values = (generator.binomial(8, difficulty) / 8)[:, None]
        low, high = intervals(values, resamples=300, seed=trial)
        covered += bool(low[0] <= 0.6 <= high[0])
        error = 1.96 * math.sqrt(0.6 * 0.4 / (60 * 8))  # as if all 480 answers were independent
        narrow += bool(abs(means(values)[0] - 0.6) <= error)
    assert 0.91 <= covered / 400 <= 0.98
    assert narrow / 400 < 0.7


def test_intervals_are_the_same_each_time_and_leave_out_what_is_not_defined() -> None:
    values = np.array([[0.0, np.nan, 1.0], [1.0, 0.5, np.nan], [0.5, np.nan, 3.0]])
    assert means(values).tolist() == [0.5, 0.5, 2.0]
    low, high = intervals(values)
    again = intervals(values)
    assert np.array_equal(low, again[0], equal_nan=True)
    assert np.array_equal(high, again[1], equal_nan=True)
    assert np.isnan([low[1], high[1]]).all()
    assert low[2] == 1.0
    assert high[2] == 3.0


def test_a_summary_by_hand() -> None:
    prompts = [
        ScoredPrompt("math", [1.0, 0.0, 0.0, 1.0], ["2", "3", "4", "2"]),
        ScoredPrompt("math", [0.0, 0.0, 0.5], ["7", None, "7"], errors=1),
        ScoredPrompt("code", [], [], errors=4),
        ScoredPrompt("code", [1.0, 1.0, 0.0, 0.0], [None] * 4),
    ]
    summary = summarise(prompts, pass_score=1.0)
    whole, math_, code = summary.whole, summary.sources["math"], summary.sources["code"]
    assert (whole.prompts, whole.n, whole.samples, whole.errors, whole.answers) == (4, 4, 11, 5, 6)
    assert math_.mean is not None
    assert math_.majority is not None
    assert math_.mean.value == pytest.approx((1 / 2 + 1 / 6) / 2)
    assert math_.majority.value == pytest.approx((1.0 + 0.25) / 2)
    assert {k: (e.value, e.prompts) for k, e in math_.passed.items()} == {
        1: (0.25, 2), 2: (pytest.approx(5 / 12), 2), 4: (1.0, 1)
    }  # fmt: skip
    assert code.majority is None
    assert code.mean is not None
    assert (code.mean.value, code.mean.low, code.mean.prompts) == (0.5, None, 1)
    assert list(estimates_of(code)) == ["mean@4", "pass@1", "pass@2", "pass@4", "best@4"]


def test_without_scores_there_are_no_numbers() -> None:
    summary = summarise([ScoredPrompt("", [], [], errors=2)], pass_score=1.0)
    assert summary.sources == {}
    assert estimates_of(summary.whole) == {}
    assert (summary.whole.errors, summary.whole.prompts) == (2, 1)
