"""Advantages of the samples of a training step, from their rewards, by the name of the estimator.

    over outcomes   one reward per sample in, one advantage per sample out, spread over its response tokens
    over tokens     one reward per token in (and the critic's value of each), one advantage per token out

    shape the rewards ─▶ estimate ─▶ whiten over the step's tokens ─▶ clip

Outcome estimators work on plain numbers (float64), since every rank knows the whole table of a step: they need no
communication. Token estimators see the samples of their own rank; only the sums of whitening travel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policy_worker.errors import BadBatchError, OwnCodeFailedError, SettingsError
from schema.config import GrpoConfig
from schema.util.own_code import OwnCodeError, is_own, load_function

STD_EPSILON = 1e-6
"""Keeps quotients finite for groups whose rewards are all equal (their advantages are 0)."""
VARIANCE_EPSILON = 1e-8
"""The same for whitening, which divides by the root of a variance."""


Formula = Callable[[list[float]], list[float]]
"""Scores of some samples -> a number for each."""


@dataclass(frozen=True)
class Outcomes:
    """The scored samples of a step, n of them: score, group and generated tokens of each.

    baselines: the score of the greedy sample of each one's group, [n]; empty where groups have none.
    sources: where the prompt of each comes from (`data_source`), [n]; empty where there is but one.
    """

    scores: Sequence[float]
    groups: Sequence[int]
    tokens: Sequence[int]
    baselines: Sequence[float] = ()
    sources: Sequence[str] = ()

    def per_group(self, formula: Formula) -> list[float]:
        """Apply a formula to the scores of each group; its values in the order of the samples, [n]."""
        found = [0.0] * len(self.scores)
        for rows in self.rows_by_group():
            for row, value in zip(rows, formula([self.scores[row] for row in rows]), strict=True):
                found[row] = value
        return found

    def rows_by_group(self) -> list[list[int]]:
        """The samples of each group, groups in the order of their first sample."""
        rows: dict[int, list[int]] = defaultdict(list)
        for row, group in enumerate(self.groups):
            rows[group].append(row)
        return list(rows.values())


@dataclass(frozen=True)
class Options:
    """What estimators read of `[train.train_policy]`; see the keys of these names."""

    unbiased_advantage: bool = False
    gamma: float = 1.0
    gae_lambda: float = 1.0


@dataclass(frozen=True)
class TokenOutcomes:
    """What the generated tokens of each sample of this rank earned, [n_i] each, in the order of generation.

    values: what the critic expected before each token, of the same shapes; empty without a critic.
    """

    rewards: Sequence[Tensor]
    values: Sequence[Tensor] = ()


OutcomeEstimator = Callable[[Outcomes, Options], Sequence[float]]
"""(the n scored samples, options) -> one advantage each, [n]."""
TokenEstimator = Callable[[TokenOutcomes, Options], Sequence[Tensor]]
"""(rewards of the tokens of each sample, options) -> advantages of the same shapes."""


@dataclass(frozen=True)
class Estimator:
    """A registered estimator, over outcomes or over tokens. whitens: its definition ends with whitening."""

    over_outcomes: OutcomeEstimator | None = None
    over_tokens: TokenEstimator | None = None
    whitens: bool = False


ESTIMATORS: dict[str, Estimator] = {}
"""`train.train_policy.advantage_estimator` to its functions."""


def outcome_estimator(name: str, *, whitens: bool = False) -> Callable[[OutcomeEstimator], OutcomeEstimator]:
    """Register a function over outcomes as the advantage estimator of this name."""

    def register(estimate: OutcomeEstimator) -> OutcomeEstimator:
        ESTIMATORS[name] = Estimator(over_outcomes=estimate, whitens=whitens)
        return estimate

    return register


def token_estimator(name: str, *, whitens: bool = False) -> Callable[[TokenEstimator], TokenEstimator]:
    """Register a function over tokens as the advantage estimator of this name."""

    def register(estimate: TokenEstimator) -> TokenEstimator:
        ESTIMATORS[name] = Estimator(over_tokens=estimate, whitens=whitens)
        return estimate

    return register


def estimator_of(name: str) -> Estimator:
    """Raises `SettingsError` for a name that is not registered, or a user's function that cannot be loaded."""
    if is_own(name):
        try:
            return Estimator(over_outcomes=_checked(load_function(name), name))
        except OwnCodeError as error:
            raise SettingsError(f"train.train_policy.advantage_estimator = {name!r}: {error}") from error
    if name not in ESTIMATORS:
        raise SettingsError(
            f"train.train_policy.advantage_estimator = {name!r} is not an advantage estimator; known are "
            f"{', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]


def _checked(estimate: OutcomeEstimator, name: str) -> OutcomeEstimator:
    """A user's estimator, whose every answer is n finite numbers. Raises `OwnCodeFailedError`."""

    def run(outcomes: Outcomes, options: Options) -> list[float]:
        what = f"train.train_policy.advantage_estimator = {name!r}"
        n = len(outcomes.scores)
        try:
            found = [float(value) for value in estimate(outcomes, options)]
        except Exception as error:
            raise OwnCodeFailedError(
                f"{what} failed on {n} samples: {type(error).__name__}: {error}"
            ) from error
        if len(found) != n:
            raise OwnCodeFailedError(f"{what} returned {len(found)} advantages for {n} samples")
        for row, value in enumerate(found):
            if not math.isfinite(value):
                raise OwnCodeFailedError(f"{what} returned {value} for sample {row} of {n}")
        return found

    return run


# ---- over outcomes ----------------------------------------------------------------------------------------------


@outcome_estimator("grpo")
def grpo(outcomes: Outcomes, options: Options) -> list[float]:
    """Group-relative advantages: (s − mean) / (std + 1e-6), std with n − 1.

    A group of one has mean 0 and std 1. `unbiased_advantage` leaves out the division (Dr. GRPO).
    Sources: GRPO, arXiv 2402.03300, §4.1.2; Dr. GRPO, arXiv 2503.20783, §3.1.
    """

    def of_group(scores: list[float]) -> list[float]:
        centred = _centred(scores)
        return centred if options.unbiased_advantage else [c / (_std(scores) + STD_EPSILON) for c in centred]

    return outcomes.per_group(of_group)


@outcome_estimator("rloo")
def rloo(outcomes: Outcomes, options: Options) -> list[float]:
    """The score minus the mean of the others, n / (n − 1) · (s − mean). A group of one keeps its score.

    Source: RLOO, arXiv 2402.14740, eq. 6.
    """

    def of_group(scores: list[float]) -> list[float]:
        n = len(scores)
        return [c * n / (n - 1) for c in _centred(scores)] if n > 1 else scores

    return outcomes.per_group(of_group)


@outcome_estimator("reinforce_plus_plus_baseline", whitens=True)
def reinforce_plus_plus_baseline(outcomes: Outcomes, options: Options) -> list[float]:
    """s − mean of the group (a group of one keeps its score), then whitened over the tokens of the step.

    Source: REINFORCE++, arXiv 2501.03262, §3.3.
    """
    return outcomes.per_group(_centred)


@outcome_estimator("opo")
def opo(outcomes: Outcomes, options: Options) -> list[float]:
    """s − Σ len · s / Σ len, the baseline of least variance where a gradient's norm grows with length.

    Source: OPO, arXiv 2505.23585, eq. 9.
    """
    found = [0.0] * len(outcomes.scores)
    for rows in outcomes.rows_by_group():
        lengths = [outcomes.tokens[row] for row in rows]
        baseline = mean_of([outcomes.scores[row] for row in rows], lengths)
        for row in rows:
            found[row] = outcomes.scores[row] - baseline
    return found


@outcome_estimator("remax")
def remax(outcomes: Outcomes, options: Options) -> list[float]:
    """The score minus that of the greedy sample of the same prompt.

    Source: ReMax, arXiv 2310.10505. Raises `BadBatchError`: a group has no greedy sample with a score.
    """
    if len(outcomes.baselines) != len(outcomes.scores):
        raise BadBatchError(
            'train.train_policy.advantage_estimator = "remax" needs the greedy sample of each group, and this batch '
            "lacks some: it was made with another estimator"
        )
    return [score - base for score, base in zip(outcomes.scores, outcomes.baselines, strict=True)]


@outcome_estimator("gpg")
def gpg(outcomes: Outcomes, options: Options) -> list[float]:
    """α (s − mean of the group), α = n / #{s ≠ mean} over the step: groups that say nothing do not dilute the rest.

    Source: GPG, arXiv 2504.02546, eq. 8 and 9.
    """
    centred = outcomes.per_group(_centred)
    alpha = len(centred) / max(sum(value != 0 for value in centred), 1)
    return [alpha * value for value in centred]


@outcome_estimator("pass_at_k")
def pass_at_k(outcomes: Outcomes, options: Options) -> list[float]:
    """The best of a group alone gets something: how far it is ahead of the second, s_max − s_second.

    Divided by (std + 1e-6) of the group, unless `unbiased_advantage`. Of several best ones none is ahead. A group of
    one has no second and gets 0.
    Source: pass@k training, arXiv 2503.19595, §3.
    """

    def of_group(scores: list[float]) -> list[float]:
        found = [0.0] * len(scores)
        if len(scores) > 1:
            second, best = sorted(scores)[-2:]
            scale = 1.0 if options.unbiased_advantage else _std(scores) + STD_EPSILON
            found[scores.index(best)] = (best - second) / scale
        return found

    return outcomes.per_group(of_group)


def _centred(scores: list[float]) -> list[float]:
    """s − mean; the only score of a group as it is."""
    return [score - mean for score, mean in zip(scores, _means(scores), strict=True)]


def _means(scores: list[float]) -> list[float]:
    """The mean for each; 0 for a single score."""
    return [mean_of(scores) if len(scores) > 1 else 0.0] * len(scores)


def mean_of(values: Sequence[float], weights: Sequence[int] | None = None) -> float:
    """Σ weight · value / Σ weight, or the plain mean: exactly the value where all are equal.

    Rounded otherwise, equal scores of 0.7 would all be a little off their mean, and a group that says nothing would
    seem to say something.
    """
    first, weights = values[0], weights or [1] * len(values)
    moved = math.fsum(weight * (value - first) for weight, value in zip(weights, values, strict=True))
    return first + moved / sum(weights)


def _std(scores: list[float]) -> float:
    """With n − 1; 1 for a single score."""
    n = len(scores)
    return math.sqrt(math.fsum(c * c for c in _centred(scores)) / (n - 1)) if n > 1 else 1.0


# ---- over tokens ------------------------------------------------------------------------------------------------


@token_estimator("reinforce_plus_plus", whitens=True)
def reinforce_plus_plus(tokens: TokenOutcomes, options: Options) -> list[Tensor]:
    """The discounted return G_t = r_t + γ G_{t+1}, then whitened over the tokens of the step.

    Tokens are those that the policy generated, so a return passes tool output unchanged.
    Source: REINFORCE++, arXiv 2501.03262, §3.1.
    """
    return discounted(tokens.rewards, options.gamma)


@token_estimator("gae", whitens=True)
def gae(tokens: TokenOutcomes, options: Options) -> list[Tensor]:
    """Generalised advantages A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, V = 0 after the last token; then
    whitened over the tokens of the step.

    V_t is the value of what stands before token t. The next token is the next one that the policy generated, so
    values and advantages pass tool output and the turns of others unchanged.
    Source: GAE, arXiv 1506.02438, eq. 16. Raises `BadBatchError`: the values are missing.
    """
    if len(tokens.values) != len(tokens.rewards):
        raise BadBatchError('train.train_policy.advantage_estimator = "gae" needs the values of a critic')
    deltas = [
        rewards + options.gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
        for rewards, values in zip(tokens.rewards, tokens.values, strict=True)
    ]
    return discounted(deltas, options.gamma * options.gae_lambda)


def discounted(rewards: Sequence[Tensor], gamma: float) -> list[Tensor]:
    """G_t = Σ_{u ≥ t} γ^(u − t) r_u of each sample, [n_i] each."""
    if not rewards:
        return []
    sums = pad_sequence([one.flip(0) for one in rewards])  # [longest, samples], last tokens first
    for position in range(1, len(sums)):
        sums[position] += gamma * sums[position - 1]
    return [sums[: len(one), sample].flip(0) for sample, one in enumerate(rewards)]


# ---- from an estimator to the advantages of a step --------------------------------------------------------------

Over = Literal["none", "group", "batch"]


@dataclass(frozen=True)
class Shaping:
    """What becomes of scores before the estimator sees them: (s − mean) / (std + 1e-6), then cut to ± clip.

    center, scale: over what the mean and the standard deviation (with n − 1) are taken: not at all, the group, or all
    scored samples of the step. The baseline of a sample is shaped by the same numbers as its score, and is part of
    none of them. Source: the reward normalisation of ROLL.
    """

    center: Over = "none"
    scale: Over = "none"
    clip: float | None = None

    def apply(self, outcomes: Outcomes) -> Outcomes:
        n = len(outcomes.scores)
        means = self._over(self.center, _means, outcomes, [0.0] * n)
        stds = self._over(self.scale, _divisors, outcomes, [1.0] * n)

        def shaped(values: Sequence[float]) -> list[float]:
            found = [(value - mean) / std for value, mean, std in zip(values, means, stds, strict=True)]
            return [_bounded(value, self.clip) for value in found]

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
    """Of all samples of a step: one number each, and where tokens differ one for each token of this rank's samples.

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

    estimator: Estimator
    options: Options = Options()
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
            row
            for row, score in enumerate(scores)
            if score is not None and tokens[row] > 0 and row not in based
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
            mine = sorted(rows & shaped.keys())
            return self._over_tokens(shaped, tokens, mine, token_rewards or {}, values, reduce, counted)
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
        mine: Sequence[int],
        rewards: Mapping[int, Tensor],
        values: Mapping[int, Tensor] | None,
        reduce: Reduce,
        counted: Collection[int],
    ) -> Advantages:
        """A score is the reward of its sample's last token."""
        assert self.estimator.over_tokens is not None
        whole = []
        for row in mine:
            reward = (
                rewards[row].double() if row in rewards else torch.zeros(tokens[row], dtype=torch.float64)
            )
            whole.append(torch.cat([reward[:-1], reward[-1:] + scores[row]]))
        expected = [values[row].double() for row in mine] if values is not None else []
        found = list(self.estimator.over_tokens(TokenOutcomes(whole, expected), self.options))
        returns = [gained + value for gained, value in zip(found, expected, strict=True)] if expected else []
        if self._whitens:
            ours = [one for row, one in zip(mine, found, strict=True) if row in counted]
            found = whiten_tokens(found, ours, reduce)
        if self.clip is not None:
            found = [one.clamp(-self.clip, self.clip) for one in found]
        means = [0.0] * len(tokens)
        for row, one in zip(mine, found, strict=True):
            means[row] = float(one.mean()) if row in counted else 0.0
        by_row = dict(zip(mine, returns, strict=True)) if returns else {}
        return Advantages(reduce(means), dict(zip(mine, found, strict=True)), by_row)


def whiten(values: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """(A − mean) · rsqrt(var + 1e-8) over the tokens, of which `tokens` have each value; var with N − 1.

    One token alone only loses its mean.
    """
    total = sum(tokens)
    mean = mean_of(values, tokens) if total else 0.0
    squares = math.fsum(n * (value - mean) ** 2 for n, value in zip(tokens, values, strict=True))
    return [(value - mean) * _scale(squares, total) for value in values]


def whiten_tokens(values: Sequence[Tensor], counted: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """The same of single tokens on all data ranks. counted: those that this rank counts. A collective."""
    total, summed = reduce([float(sum(map(len, counted))), math.fsum(float(one.sum()) for one in counted)])
    mean = summed / max(total, 1)
    (squares,) = reduce([math.fsum(float(((one - mean) ** 2).sum()) for one in counted)])
    return [(one - mean) * _scale(squares, total) for one in values]


def _scale(squares: float, total: float) -> float:
    return 1 / math.sqrt(squares / (total - 1) + VARIANCE_EPSILON) if total > 1 else 1.0
