"""Advantage estimators, by name: from rewards to advantages.

    over outcomes   one reward per sample in, one advantage per sample out, spread over its response tokens
    over tokens     one reward per token in (and the critic's value of each), one advantage per token out

Outcome estimators work on plain numbers (float64), since every rank knows the whole table of a step: they need no
communication. Token estimators see the samples of their own rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from policy_worker.errors import BadBatchError, OwnCodeFailedError, SettingsError
from schema.util.own_code import OwnCodeError, is_own, load_function

STD_EPSILON = 1e-6
"""Keeps quotients finite for groups whose rewards are all equal (their advantages are 0)."""


Formula = Callable[[list[float]], list[float]]
"""Scores of some samples -> a number for each."""


@dataclass(frozen=True)
class Outcomes:
    """The scored samples of a step, n of them: score, group and generated tokens of each.

    baselines: the score of the greedy sample of each one's group, [n]; empty where groups have none.
    sources: where the prompt of each comes from (`data_source`), [n]; empty where there is but one."""

    scores: Sequence[float]
    groups: Sequence[int]
    tokens: Sequence[int]
    baselines: Sequence[float] = ()
    sources: Sequence[str] = ()

    def per_group(self, formula: Formula) -> list[float]:
        """Apply a formula to the scores of each group; its values in the order of the samples, [n]."""
        advantages = [0.0] * len(self.scores)
        for rows in self.rows_by_group():
            for row, value in zip(rows, formula([self.scores[row] for row in rows]), strict=True):
                advantages[row] = value
        return advantages

    def rows_by_group(self) -> list[list[int]]:
        """The samples of each group, groups in the order of their first sample."""
        rows: dict[int, list[int]] = defaultdict(list)
        for row, group in enumerate(self.groups):
            rows[group].append(row)
        return list(rows.values())


@dataclass(frozen=True)
class Options:
    """The options that estimators read of `[train.train_policy]`; see the keys of these names."""

    unbiased_advantage: bool = False
    gamma: float = 1.0
    gae_lambda: float = 1.0


@dataclass(frozen=True)
class TokenOutcomes:
    """Earnings of the generated tokens of each sample of this rank, [n_i] each, in the order of generation.

    values: what the critic expected before each token, of the same shapes; empty without a critic."""

    rewards: Sequence[Tensor]
    values: Sequence[Tensor] = ()


OutcomeEstimator = Callable[[Outcomes, Options], Sequence[float]]
"""(the n scored samples, options) -> one advantage each, [n]."""


TokenEstimator = Callable[[TokenOutcomes, Options], Sequence[Tensor]]
"""(rewards of the tokens of each sample, options) -> advantages of the same shapes."""


@dataclass(frozen=True)
class RegisteredEstimator:
    """A registered estimator, over outcomes or over tokens. whitens: its definition ends with whitening."""

    over_outcomes: OutcomeEstimator | None = None
    over_tokens: TokenEstimator | None = None
    whitens: bool = False


ESTIMATORS: dict[str, RegisteredEstimator] = {}
"""`train.train_policy.advantage_estimator` to its functions."""


def outcome_estimator(name: str, *, whitens: bool = False) -> Callable[[OutcomeEstimator], OutcomeEstimator]:
    """Register a function over outcomes as the advantage estimator of this name."""

    def register(estimate: OutcomeEstimator) -> OutcomeEstimator:
        ESTIMATORS[name] = RegisteredEstimator(over_outcomes=estimate, whitens=whitens)
        return estimate

    return register


def token_estimator(name: str, *, whitens: bool = False) -> Callable[[TokenEstimator], TokenEstimator]:
    """Register a function over tokens as the advantage estimator of this name."""

    def register(estimate: TokenEstimator) -> TokenEstimator:
        ESTIMATORS[name] = RegisteredEstimator(over_tokens=estimate, whitens=whitens)
        return estimate

    return register


def estimator_of(name: str) -> RegisteredEstimator:
    """Raises `SettingsError` for a name that is not registered, or a user's function that cannot be loaded."""
    if is_own(name):
        try:
            return RegisteredEstimator(over_outcomes=_checked(load_function(name), name))
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
            advantages = [float(value) for value in estimate(outcomes, options)]
        except Exception as error:
            raise OwnCodeFailedError(f"{what} failed on {n} samples: {type(error).__name__}: {error}") from error
        if len(advantages) != n:
            raise OwnCodeFailedError(f"{what} returned {len(advantages)} advantages for {n} samples")
        for row, value in enumerate(advantages):
            if not math.isfinite(value):
                raise OwnCodeFailedError(f"{what} returned {value} for sample {row} of {n}")
        return advantages

    return run


@outcome_estimator("grpo")
def grpo(outcomes: Outcomes, options: Options) -> list[float]:
    """Group-relative advantages: (s − mean) / (std + 1e-6), std with n − 1.

    A group of one has mean 0 and std 1. `unbiased_advantage` leaves out the division (Dr. GRPO).
    Sources: GRPO, arXiv 2402.03300, §4.1.2; Dr. GRPO, arXiv 2503.20783, §3.1."""

    def of_group(scores: list[float]) -> list[float]:
        centred = _centred(scores)
        return centred if options.unbiased_advantage else [c / (_std(scores) + STD_EPSILON) for c in centred]

    return outcomes.per_group(of_group)


@outcome_estimator("rloo")
def rloo(outcomes: Outcomes, options: Options) -> list[float]:
    """The score minus the mean of the others, n / (n − 1) · (s − mean). A group of one keeps its score.

    Source: RLOO, arXiv 2402.14740, eq. 6."""

    def of_group(scores: list[float]) -> list[float]:
        n = len(scores)
        return [c * n / (n - 1) for c in _centred(scores)] if n > 1 else scores

    return outcomes.per_group(of_group)


@outcome_estimator("reinforce_plus_plus_baseline", whitens=True)
def reinforce_plus_plus_baseline(outcomes: Outcomes, options: Options) -> list[float]:
    """s − mean of the group (a group of one keeps its score), then whitened over the tokens of the step.

    Source: REINFORCE++, arXiv 2501.03262, §3.3."""
    return outcomes.per_group(_centred)


@outcome_estimator("opo")
def opo(outcomes: Outcomes, options: Options) -> list[float]:
    """s − Σ len · s / Σ len, the baseline of least variance where a gradient's norm grows with length.

    Source: OPO, arXiv 2505.23585, eq. 9."""
    advantages = [0.0] * len(outcomes.scores)
    for rows in outcomes.rows_by_group():
        lengths = [outcomes.tokens[row] for row in rows]
        baseline = mean_of([outcomes.scores[row] for row in rows], lengths)
        for row in rows:
            advantages[row] = outcomes.scores[row] - baseline
    return advantages


@outcome_estimator("remax")
def remax(outcomes: Outcomes, options: Options) -> list[float]:
    """The score minus that of the greedy sample of the same prompt.

    Source: ReMax, arXiv 2310.10505. Raises `BadBatchError`: a group has no greedy sample with a score."""
    if len(outcomes.baselines) != len(outcomes.scores):
        raise BadBatchError(
            'train.train_policy.advantage_estimator = "remax" needs the greedy sample of each group, and this batch '
            "lacks some: it was made with another estimator"
        )
    return [score - base for score, base in zip(outcomes.scores, outcomes.baselines, strict=True)]


@outcome_estimator("gpg")
def gpg(outcomes: Outcomes, options: Options) -> list[float]:
    """α (s − mean of the group), α = n / #{s ≠ mean} over the step: groups that say nothing do not dilute the rest.

    Source: GPG, arXiv 2504.02546, eq. 8 and 9."""
    centred = outcomes.per_group(_centred)
    alpha = len(centred) / max(sum(value != 0 for value in centred), 1)
    return [alpha * value for value in centred]


@outcome_estimator("pass_at_k")
def pass_at_k(outcomes: Outcomes, options: Options) -> list[float]:
    """The best of a group alone gets something: how far it is ahead of the second, s_max − s_second.

    Divided by (std + 1e-6) of the group, unless `unbiased_advantage`. Of several best ones none is ahead. A group of
    one has no second and gets 0.
    Source: pass@k training, arXiv 2503.19595, §3."""

    def of_group(scores: list[float]) -> list[float]:
        advantages = [0.0] * len(scores)
        if len(scores) > 1:
            second, best = sorted(scores)[-2:]
            scale = 1.0 if options.unbiased_advantage else _std(scores) + STD_EPSILON
            advantages[scores.index(best)] = (best - second) / scale
        return advantages

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
    seem to say something."""
    first, weights = values[0], weights or [1] * len(values)
    moved = math.fsum(weight * (value - first) for weight, value in zip(weights, values, strict=True))
    return first + moved / sum(weights)


def _std(scores: list[float]) -> float:
    """With n − 1; 1 for a single score."""
    n = len(scores)
    return math.sqrt(math.fsum(c * c for c in _centred(scores)) / (n - 1)) if n > 1 else 1.0


@token_estimator("reinforce_plus_plus", whitens=True)
def reinforce_plus_plus(tokens: TokenOutcomes, options: Options) -> list[Tensor]:
    """The discounted return G_t = r_t + γ G_{t+1}, then whitened over the tokens of the step.

    Tokens are those that the policy generated, so a return passes tool output unchanged.
    Source: REINFORCE++, arXiv 2501.03262, §3.1."""
    return discounted(tokens.rewards, options.gamma)


@token_estimator("gae", whitens=True)
def gae(tokens: TokenOutcomes, options: Options) -> list[Tensor]:
    """Generalised advantages A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, V = 0 after the last token; then
    whitened over the tokens of the step.

    V_t is the value of what stands before token t. The next token is the next one that the policy generated, so
    values and advantages pass tool output and the turns of others unchanged.
    Source: GAE, arXiv 1506.02438, eq. 16. Raises `BadBatchError`: the values are missing."""
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
    sums = pad_sequence([of_sample.flip(0) for of_sample in rewards])  # [longest, samples], last tokens first
    for position in range(1, len(sums)):
        sums[position] += gamma * sums[position - 1]
    return [sums[: len(of_sample), sample].flip(0) for sample, of_sample in enumerate(rewards)]
