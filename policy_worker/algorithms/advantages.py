"""Advantages of the samples of a training step, from their rewards, by the name of the estimator.

    shape the rewards ─▶ estimate ─▶ whiten over the step's tokens ─▶ clip

Estimators over outcomes need no communication (`policy_worker.algorithms.estimators`); of those over tokens only the
sums of whitening travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from policy_worker.algorithms.estimators import (
    STD_EPSILON,
    Formula,
    Options,
    Outcomes,
    RegisteredEstimator,
    TokenOutcomes,
    _means,
    _std,
    estimator_of,
    mean_of,
)
from schema.config import GrpoConfig

VARIANCE_EPSILON = 1e-8
"""The same for whitening, which divides by the root of a variance."""


Over = Literal["none", "group", "batch"]


@dataclass(frozen=True)
class Shaping:
    """The shaping of scores before the estimator sees them: (s − mean) / (std + 1e-6), then cut to ± clip.

    center, scale: over what the mean and the standard deviation (with n − 1) are taken: not at all, the group, or all
    scored samples of the step. The baseline of a sample is shaped by the same numbers as its score, and is part of
    none of them. Source: the reward normalisation of ROLL."""

    center: Over = "none"
    scale: Over = "none"
    clip: float | None = None

    def apply(self, outcomes: Outcomes) -> Outcomes:
        n = len(outcomes.scores)
        means = self._over(self.center, _means, outcomes, [0.0] * n)
        stds = self._over(self.scale, _divisors, outcomes, [1.0] * n)

        def shaped(values: Sequence[float]) -> list[float]:
            scaled = [(value - mean) / std for value, mean, std in zip(values, means, stds, strict=True)]
            return [_bounded(value, self.clip) for value in scaled]

        baselines = shaped(outcomes.baselines) if outcomes.baselines else ()
        return replace(outcomes, scores=shaped(outcomes.scores), baselines=baselines)

    @staticmethod
    def _over(over: Over, formula: Formula, outcomes: Outcomes, otherwise: list[float]) -> list[float]:
        if over == "group":
            return outcomes.per_group(formula)
        return formula(list(outcomes.scores)) if over == "batch" else otherwise


def _divisors(scores: list[float]) -> list[float]:
    return [_std(scores) + STD_EPSILON] * len(scores)


def _bounded(value: float, bound: float | None) -> float:
    return value if bound is None else max(-bound, min(value, bound))


@dataclass(frozen=True)
class Advantages:
    """Advantages of a step's samples: one number each, and where tokens differ one for each of this rank's tokens.

    by_sample: [n], in the order of the table; with `by_token` the means over the tokens of each.
    by_token: row to [n_i]. returns: what the critic should have expected of each token, likewise; where it is asked.
    """

    by_sample: list[float]
    by_token: Mapping[int, Tensor] | None = None
    returns: Mapping[int, Tensor] = field(default_factory=dict)

    def of_tokens(self, rows: Sequence[int], sample: Tensor, like: Tensor) -> Tensor:
        """One for each token, [K], of the samples at `rows`; sample: index into `rows` of each token, in order."""
        if self.by_token is None:
            return like.new_tensor([self.by_sample[row] for row in rows])[sample]
        parts = [self.by_token[row] for row in rows]
        return torch.cat(parts).to(like) if parts else like.new_zeros(0)


Reduce = Callable[[list[float]], list[float]]
"""Sums over all data ranks, number by number."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How the advantages of a step are made. whiten: None: as the estimator is defined. clip: to ± this, at last."""

    estimator: RegisteredEstimator
    options: Options = Options()  # noqa: RUF009
    shaping: Shaping = Shaping()
    whiten: bool | None = None
    clip: float | None = None

    @staticmethod
    def of_config(grpo: GrpoConfig) -> AdvantageConfig:
        """Read `[train.train_policy]`. Raises `SettingsError` for an unknown estimator."""
        shaping = grpo.reward_shaping
        return AdvantageConfig(
            estimator_of(grpo.advantage_estimator),
            Options(grpo.unbiased_advantage, grpo.gamma, grpo.gae_lambda),
            Shaping(center=shaping.center, scale=shaping.scale, clip=shaping.clip),
            whiten=grpo.whiten_advantages,
            clip=grpo.advantage_clip,
        )

    def of_step(
        self,
        scores: Sequence[float | None],
        groups: Sequence[int],
        tokens: Sequence[int],
        rows: Iterable[int],
        reduce: Reduce,
        token_rewards: Mapping[int, Tensor] | None = None,
        greedy: Sequence[bool] = (),
        sources: Sequence[str] = (),
        values: Mapping[int, Tensor] | None = None,
        counted: Collection[int] | None = None,
    ) -> Advantages:
        """The advantages of a step. A collective for estimators over tokens, and with `token_rewards`.

        Args:
            scores: one per sample, [n]; None: it takes no part, neither in its group's statistics, and gets 0.
            groups, tokens: which group each belongs to, and how many tokens of it count, [n].
            rows: the samples of this rank.
            token_rewards: for each of them rewards of its tokens, [n_i], in addition to its score.
            greedy: which samples are the baselines of their groups, [n]: they take no part but for that; empty: none.
            sources: where the prompt of each sample comes from, [n]; empty: there is but one.
            values: the critic's, of each token of the rows, [n_i]; None: without a critic.
            counted: the rows that this rank counts in sums, where another one may have some of them too; None: all.
        """
        rows = set(rows)
        counted = rows if counted is None else counted
        based = {row for row, is_greedy in enumerate(greedy) if is_greedy}
        bases = {groups[row]: score for row in based if (score := scores[row]) is not None}
        chosen = [
            row for row, score in enumerate(scores) if score is not None and tokens[row] > 0 and row not in based
        ]
        outcomes = self.shaping.apply(
            Outcomes(
                [float(scores[row] or 0.0) for row in chosen],
                [groups[row] for row in chosen],
                [tokens[row] for row in chosen],
                [bases[groups[row]] for row in chosen if groups[row] in bases],
                [sources[row] for row in chosen] if sources else (),
            )
        )
        shaped = dict(zip(chosen, outcomes.scores, strict=True))
        if self.estimator.over_tokens is not None:
            rows_here = sorted(rows & shaped.keys())
            return self._over_tokens(shaped, tokens, rows_here, token_rewards or {}, values, reduce, counted)
        if token_rewards is not None:
            added = reduce(
                [
                    float(token_rewards[row].sum()) if row in token_rewards and row in counted else 0.0
                    for row in chosen
                ]
            )
            outcomes = replace(outcomes, scores=[s + a for s, a in zip(outcomes.scores, added, strict=True)])
        assert self.estimator.over_outcomes is not None
        advantages = list(self.estimator.over_outcomes(outcomes, self.options))
        if self._whitens:
            advantages = whiten(advantages, outcomes.tokens)
        of_rows = [0.0] * len(scores)
        for row, advantage in zip(chosen, advantages, strict=True):
            of_rows[row] = _bounded(advantage, self.clip)
        return Advantages(of_rows)

    @property
    def _whitens(self) -> bool:
        return self.estimator.whitens if self.whiten is None else self.whiten

    def _over_tokens(
        self,
        scores: Mapping[int, float],
        tokens: Sequence[int],
        rows_here: Sequence[int],
        rewards: Mapping[int, Tensor],
        values: Mapping[int, Tensor] | None,
        reduce: Reduce,
        counted: Collection[int],
    ) -> Advantages:
        """A score is the reward of its sample's last token."""
        assert self.estimator.over_tokens is not None
        whole = []
        for row in rows_here:
            reward = rewards[row].double() if row in rewards else torch.zeros(tokens[row], dtype=torch.float64)
            whole.append(torch.cat([reward[:-1], reward[-1:] + scores[row]]))
        expected = [values[row].double() for row in rows_here] if values is not None else []
        estimates = list(self.estimator.over_tokens(TokenOutcomes(whole, expected), self.options))
        returns = [gain + value for gain, value in zip(estimates, expected, strict=True)] if expected else []
        if self._whitens:
            counted_here = [each for row, each in zip(rows_here, estimates, strict=True) if row in counted]
            estimates = whiten_tokens(estimates, counted_here, reduce)
        if self.clip is not None:
            estimates = [sample.clamp(-self.clip, self.clip) for sample in estimates]
        means = [0.0] * len(tokens)
        for row, sample in zip(rows_here, estimates, strict=True):
            means[row] = float(sample.mean()) if row in counted else 0.0
        by_row = dict(zip(rows_here, returns, strict=True)) if returns else {}
        return Advantages(reduce(means), dict(zip(rows_here, estimates, strict=True)), by_row)


def whiten(values: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """(A − mean) · rsqrt(var + 1e-8) over the tokens, of which `tokens` have each value; var with N − 1.

    One token alone only loses its mean."""
    total = sum(tokens)
    mean = mean_of(values, tokens) if total else 0.0
    squares = math.fsum(n * (value - mean) ** 2 for n, value in zip(tokens, values, strict=True))
    return [(value - mean) * _scale(squares, total) for value in values]


def whiten_tokens(values: Sequence[Tensor], counted: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """The same of single tokens on all data ranks. counted: those that this rank counts. A collective."""
    total, summed = reduce([float(sum(map(len, counted))), math.fsum(float(each.sum()) for each in counted)])
    mean = summed / max(total, 1)
    (squares,) = reduce([math.fsum(float(((sample - mean) ** 2).sum()) for sample in counted)])
    return [(sample - mean) * _scale(squares, total) for sample in values]


def _scale(squares: float, total: float) -> float:
    return 1 / math.sqrt(squares / (total - 1) + VARIANCE_EPSILON) if total > 1 else 1.0
