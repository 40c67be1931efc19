from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_worker.algorithms.advantages import AdvantageConfig, Shaping
from policy_worker.algorithms.estimators import (
    ESTIMATORS,
    Options,
    Outcomes,
    RegisteredEstimator,
    TokenOutcomes,
    discounted,
    estimator_of,
    outcome_estimator,
)
from policy_worker.errors import BadBatchError, OwnCodeFailedError, SettingsError
from tests.support.effort import examples

PLAIN = Options()


def alone(sums: list[float]) -> list[float]:
    return sums


def of_group(name: str, scores: Sequence[float], unbiased: bool = False) -> list[float]:
    """The advantages of one group whose samples have 1, 2, … tokens, before whitening."""
    outcomes = Outcomes(scores, [0] * len(scores), list(range(1, len(scores) + 1)))
    estimate = estimator_of(name).over_outcomes
    assert estimate is not None
    return list(estimate(outcomes, Options(unbiased_advantage=unbiased)))


def test_grpo_by_hand():
    # scores 1, 0, 0, 1: mean 0.5, squares sum to 1, unbiased variance 1/3
    value = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert of_group("grpo", [1, 0, 0, 1]) == pytest.approx([value, -value, -value, value], rel=1e-12)
    assert of_group("grpo", [3, 1], unbiased=True) == [1.0, -1.0]
    assert of_group("grpo", [3, 1])[0] == pytest.approx(1 / math.sqrt(2), rel=1e-5)


BY_HAND = [
    # leave one out: 4 − 1.5, 1 − 3, 2 − 2.5
    ("rloo", [4, 1, 2], False, [2.5, -2.0, -0.5]),
    ("reinforce_plus_plus_baseline", [4, 0, 2], False, [2.0, -2.0, 0.0]),
    # lengths 1, 2, 3: baseline (4 + 0 + 6) / 6
    ("opo", [4, 0, 2], False, [4 - 10 / 6, -10 / 6, 2 - 10 / 6]),
    # two of three differ from the mean of 2
    ("gpg", [4, 0, 2], False, [3.0, -3.0, 0.0]),
    ("pass_at_k", [4, 1, 2], True, [2.0, 0.0, 0.0]),
    ("pass_at_k", [0, 0, 1], False, [0.0, 0.0, 1 / (math.sqrt(1 / 3) + 1e-6)]),
]


@pytest.mark.parametrize(("name", "scores", "unbiased", "expected"), BY_HAND)
def test_by_hand(name: str, scores: list[float], unbiased: bool, expected: list[float]):
    assert of_group(name, scores, unbiased) == pytest.approx(expected, rel=1e-12)


ALL_alone = {
    "grpo": 0.75 / (1 + 1e-6),
    "rloo": 0.75,
    "reinforce_plus_plus_baseline": 0.75,
    "opo": 0.0,
    "gpg": 0.75,
    "pass_at_k": 0.0,
}


@pytest.mark.parametrize(("name", "expected"), ALL_alone.items())
def test_a_group_of_one(name: str, expected: float):
    assert of_group(name, [0.75]) == pytest.approx([expected], rel=1e-12)


@pytest.mark.scaled
@settings(max_examples=examples(20))
@given(
    st.lists(st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=8), max_size=4), st.booleans()
)
def test_agrees_with_numpy(groups: list[list[float]], unbiased: bool):
    for scores in groups:
        x = np.array(scores)
        expected = x - x.mean()
        if not unbiased:
            expected = expected / (x.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(of_group("grpo", scores, unbiased), expected, rtol=1e-9, atol=1e-9)
        others = [np.delete(x, i).mean() for i in range(len(x))]
        np.testing.assert_allclose(of_group("rloo", scores), x - others, rtol=1e-9, atol=1e-9)


def test_discounted_returns_by_hand():
    two = [torch.tensor([1.0, 0.0, 4.0]), torch.tensor([2.0])]
    assert [one.tolist() for one in discounted(two, 0.5)] == [[2.0, 2.0, 4.0], [2.0]]
    assert [one.tolist() for one in discounted(two, 1.0)] == [[5.0, 4.0, 4.0], [2.0]]
    assert discounted([], 0.5) == []


def test_gae_by_hand():
    # γ = 0.5, λ = 0.5; δ = 0 + 0.5·2 − 1 = 0, 0 + 0.5·4 − 2 = 0, 8 − 4 = 4; A = 0.25·0.25·4, 0.25·4, 4
    config = AdvantageConfig(estimator_of("gae"), Options(gamma=0.5, gae_lambda=0.5), whiten=False)
    values = {0: torch.tensor([1.0, 2.0, 4.0]), 1: torch.tensor([3.0])}
    found = config.of_step([8.0, 1.0], [0, 0], [3, 1], [0, 1], alone, values=values)
    assert found.by_token is not None
    assert {row: one.tolist() for row, one in found.by_token.items()} == {0: [0.25, 1.0, 4.0], 1: [-2.0]}
    assert {row: one.tolist() for row, one in found.returns.items()} == {0: [1.25, 3.0, 8.0], 1: [1.0]}
    whitened = replace(config, whiten=None).of_step([8.0, 1.0], [0, 0], [3, 1], [0, 1], alone, values=values)
    assert whitened.returns.keys() == found.returns.keys(), "returns are those before whitening"
    assert all(torch.equal(whitened.returns[row], found.returns[row]) for row in (0, 1))
    with pytest.raises(BadBatchError, match="needs the values of a critic"):
        config.of_step([8.0, 1.0], [0, 0], [3, 1], [0, 1], alone)


@pytest.mark.scaled
@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=9), max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_agrees_with_its_definition(samples: list[list[tuple[float, float]]], gamma: float, gae_lambda: float):
    # the exponentially weighted mean of k-step advantages, summed up term by term
    rewards, values = ([torch.tensor([pair[i] for pair in one]).double() for one in samples] for i in (0, 1))
    estimate = estimator_of("gae").over_tokens
    assert estimate is not None
    found = estimate(TokenOutcomes(rewards, values), Options(gamma=gamma, gae_lambda=gae_lambda))
    for r, v, advantages in zip(rewards, values, found, strict=True):
        n, after = len(r), [*v.tolist()[1:], 0.0]
        for t in range(n):
            expected = sum(
                (gamma * gae_lambda) ** (u - t) * (float(r[u]) + gamma * after[u] - float(v[u])) for u in range(t, n)
            )
            assert float(advantages[t]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_failed_samples_take_no_part_in_their_group():
    config = AdvantageConfig(estimator_of("grpo"), Options(unbiased_advantage=True))
    found = config.of_step([1.0, None, 0.0, None, 5.0], [0, 0, 0, 1, 2], [1] * 5, [], alone)
    assert found.by_sample == [0.5, 0.0, -0.5, 0.0, 5.0]


@pytest.mark.parametrize("name", [*ALL_alone, "reinforce_plus_plus"])
def test_order_of_samples_does_not_matter(name: str):
    scores, group, tokens = [1.0, 2.0, 4.0, 0.0, 3.0], [0, 1, 0, 1, 0], [1, 2, 3, 4, 5]
    config, order = AdvantageConfig(estimator_of(name), Options(gamma=0.5)), [4, 2, 0, 3, 1]
    straight = config.of_step(scores, group, tokens, range(5), alone).by_sample
    shuffled = [[values[i] for i in order] for values in (scores, group, tokens)]
    found = config.of_step(*shuffled, range(5), alone).by_sample
    assert found == pytest.approx([straight[i] for i in order], rel=1e-12)


def test_whitened_over_tokens():
    # rewards on the last tokens 1 and 0 of 2 and 1 tokens: returns 0.5, 1 and 0
    config = AdvantageConfig(estimator_of("reinforce_plus_plus"), Options(gamma=0.5))
    found = config.of_step([1.0, 0.0], [0, 0], [2, 1], [0, 1], alone)
    assert found.by_token is not None
    values = torch.cat([found.by_token[0], found.by_token[1]])
    assert values.tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-6)
    assert found.by_sample == pytest.approx([0.5, -1.0], abs=1e-6)
    plain = AdvantageConfig(estimator_of("reinforce_plus_plus"), Options(gamma=0.5), whiten=False)
    assert plain.of_step([1.0, 0.0], [0, 0], [2, 1], [0, 1], alone).by_token[0].tolist() == [0.5, 1.0]  # type: ignore[index]


def test_whitening_one_value_per_sample_is_whitening_its_tokens():
    scores, tokens = [3.0, 1.0, 0.0], [2, 5, 1]
    outcome = AdvantageConfig(estimator_of("reinforce_plus_plus_baseline"))
    spread = torch.repeat_interleave(torch.tensor([5 / 3, -1 / 3, -4 / 3], dtype=torch.float64), torch.tensor(tokens))
    expected = (spread - spread.mean()) / (spread.var() + 1e-8).sqrt()
    found = outcome.of_step(scores, [0, 0, 0], tokens, [], alone).by_sample
    assert found == pytest.approx(expected[[0, 2, 7]].tolist(), rel=1e-12)


def test_ranks_share_the_sums_of_whitening():
    scores, group, tokens = [1.0, 2.0, 4.0, 0.5], [0, 0, 1, 1], [3, 1, 2, 4]
    config = AdvantageConfig(estimator_of("reinforce_plus_plus"), Options(gamma=0.9))
    whole = config.of_step(scores, group, tokens, range(4), alone)
    sums: list[list[list[float]]] = []
    for rows in ((0, 2), (1, 3)):
        sums.append([])
        config.of_step(scores, group, tokens, rows, lambda mine: sums[-1].append(mine) or mine)
    totals = [a + b for a, b in zip(sums[0][0], sums[1][0], strict=True)]
    mean = totals[1] / totals[0]
    assert totals[0] == 10
    squares = sum(
        float(((discounted([torch.tensor([0.0] * (n - 1) + [s]).double()], 0.9)[0] - mean) ** 2).sum())
        for s, n in zip(scores, tokens, strict=True)
    )

    def shared(rows: tuple[int, ...]) -> dict[int, torch.Tensor]:
        answers = iter([totals, [squares]])
        return dict(config.of_step(scores, group, tokens, rows, lambda s: next(answers, s)).by_token or {})

    assert whole.by_token is not None
    for row, values in {**shared((0, 2)), **shared((1, 3))}.items():
        torch.testing.assert_close(values, whole.by_token[row])


def test_rewards_of_tokens_add_to_the_score():
    rewards = {0: torch.tensor([-1.0, 0.0]), 1: torch.tensor([0.0])}
    outcome = AdvantageConfig(estimator_of("grpo"), Options(unbiased_advantage=True))
    assert outcome.of_step([3.0, 0.0], [0, 0], [2, 1], [0, 1], alone, rewards).by_sample == [1.0, -1.0]
    tokens = AdvantageConfig(estimator_of("reinforce_plus_plus"), whiten=False)
    found = tokens.of_step([3.0, 0.0], [0, 0], [2, 1], [0, 1], alone, rewards).by_token
    assert found is not None
    assert found[0].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("name", [name for name, one in ESTIMATORS.items() if one.over_outcomes and name != "remax"])
@pytest.mark.parametrize("score", [0.7, 0.1, 1 / 3])
def test_a_group_of_equal_scores_says_nothing_at_all(name: str, score: float):
    for n in (3, 5, 6, 7):
        found = AdvantageConfig(estimator_of(name)).of_step(
            [score] * n, [0] * n, [3, 1, 4, 2, 5, 2, 7][:n], (), alone
        )
        assert not any(found.by_sample), n


def test_clip_comes_last():
    config = AdvantageConfig(estimator_of("grpo"), Options(unbiased_advantage=True), clip=0.5)
    assert config.of_step([3.0, 1.0], [0, 0], [1, 1], [], alone).by_sample == [0.5, -0.5]
    config = AdvantageConfig(estimator_of("reinforce_plus_plus"), whiten=False, clip=2.0)
    assert config.of_step([3.0, 1.0], [0, 0], [1, 1], [0, 1], alone).by_sample == [2.0, 1.0]


REMAX = AdvantageConfig(estimator_of("remax"))


def test_remax_by_hand():
    """Two groups, the greedy sample of each in another place; one answer has no score."""
    scores, groups = [3.0, 0.5, 1.0, -1.0, None, 0.25], [0, 0, 0, 1, 1, 1]
    greedy = [False, True, False, False, False, True]
    found = REMAX.of_step(scores, groups, [2] * 6, [], alone, greedy=greedy)
    assert found.by_sample == [2.5, 0.0, 0.5, -1.25, 0.0, 0.0]
    clipped = replace(REMAX, clip=1.0).of_step(scores, groups, [2] * 6, [], alone, greedy=greedy)
    assert clipped.by_sample == [1.0, 0.0, 0.5, -1.0, 0.0, 0.0]


def test_remax_is_whitened_over_the_tokens_of_the_sampled_answers():
    config = replace(REMAX, whiten=True)
    found = config.of_step([1.0, 0.0, 0.5], [0, 0, 0], [1, 1, 90], [], alone, greedy=[False, False, True])
    assert found.by_sample == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0])


def test_a_kl_in_the_reward_is_part_of_the_return_and_not_of_the_baseline():
    rewards = {0: torch.tensor([-0.5, -0.25])}
    found = REMAX.of_step([3.0, 0.5], [0, 0], [2, 4], [0], alone, rewards, [False, True])
    assert found.by_sample == [1.75, 0.0]


@pytest.mark.parametrize("greedy", [[False] * 3, [False, False, True]])
def test_remax_without_a_baseline_is_refused(greedy: list[bool]):
    with pytest.raises(BadBatchError, match='"remax" needs the greedy sample of each group'):
        REMAX.of_step([3.0, 0.5, None], [0, 1, 1], [2, 4, 4], [0], alone, greedy=greedy)


def test_greedy_samples_are_left_out_by_other_estimators():
    config = AdvantageConfig(estimator_of("rloo"))
    found = config.of_step([3.0, 1.0, 9.0], [0, 0, 0], [1] * 3, [], alone, greedy=[False, False, True])
    assert found.by_sample == [2.0, -2.0, 0.0]


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (Shaping(center="group"), [-1.0, -1.0, 5.0]),  # nothing is subtracted from the only score of a group
        (Shaping(scale="group"), [1 / math.sqrt(8), 1 / math.sqrt(8), 5.0]),
        (Shaping(center="batch", clip=2.0), [-4 / 3, -4 / 3, 2.0]),
    ],
)
def test_a_baseline_is_shaped_like_the_scores_of_its_group(shaping: Shaping, expected: list[float]):
    """Scores 4 and 0 with baseline 1, and 3 with baseline 5."""
    shaped = shaping.apply(Outcomes([4, 0, 3], [0, 0, 1], [1] * 3, [1, 1, 5]))
    assert shaped.baselines == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (Shaping(), [4.0, 0.0, 1.0, 3.0]),
        (Shaping(center="group"), [2.0, -2.0, -1.0, 1.0]),
        (Shaping(center="batch"), [2.0, -2.0, -1.0, 1.0]),
        (Shaping(scale="group"), [4 / math.sqrt(8), 0.0, 1 / math.sqrt(2), 3 / math.sqrt(2)]),
        (Shaping(scale="batch"), [x / math.sqrt(10 / 3) for x in (4, 0, 1, 3)]),
        (Shaping(center="group", clip=1.5), [1.5, -1.5, -1.0, 1.0]),
    ],
)
def test_shaping_by_hand(shaping: Shaping, expected: list[float]):
    found = shaping.apply(Outcomes([4, 0, 1, 3], [0, 0, 1, 1], [1] * 4)).scores
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_estimator_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"advantage_estimator = 'below_best' is not .* known are grpo"):
        estimator_of("below_best")
    monkeypatch.setitem(ESTIMATORS, "below_best", estimator_of("grpo"))  # so that it is gone after the test

    @outcome_estimator("below_best")
    def below_best(outcomes: Outcomes, options: Options) -> list[float]:
        return outcomes.per_group(lambda scores: [score - max(scores) for score in scores])

    assert of_group("below_best", [1.0, 3.0]) == [-2.0, 0.0]

    def by_source(outcomes: Outcomes, options: Options) -> list[float]:
        pairs = zip(outcomes.scores, outcomes.sources, strict=True)
        return [score * len(source) for score, source in pairs]

    found = AdvantageConfig(RegisteredEstimator(by_source)).of_step(
        [1.0, None, 3.0], [0, 0, 0], [1] * 3, (), alone, sources=["a", "bb", "cc"]
    )
    assert found.by_sample == [1.0, 0.0, 6.0]


OWN = """
def good(outcomes, options):
    return [score * options.gamma for score in outcomes.scores]

def short(outcomes, options):
    return [1.0]

def broken(outcomes, options):
    return [float("nan")] * len(outcomes.scores)

def raises(outcomes, options):
    raise KeyError("x")
"""


def test_an_estimator_of_ones_own_from_a_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    outcomes = Outcomes([1.0, 2.0], [0, 0], [1, 1])

    def run(name: str) -> list[float]:
        estimate = estimator_of(f"{tmp_path}/mine.py:{name}").over_outcomes
        assert estimate is not None
        return list(estimate(outcomes, Options(gamma=0.5)))

    assert run("good") == [0.5, 1.0]
    faults = {
        "short": "returned 1 advantages for 2",
        "broken": "returned nan for sample 0",
        "raises": "KeyError: 'x'",
    }
    for name, fault in faults.items():
        with pytest.raises(OwnCodeFailedError, match=fault):
            run(name)
    with pytest.raises(SettingsError, match="has no function 'gone'"):
        run("gone")
