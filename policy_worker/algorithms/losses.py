"""The losses of reinforcement learning on single tokens, by name (`policy_worker.algorithms.objective` adds them up).

    ρ = exp(clamp(log π − log π_old, ±20)),  ℓ = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A), …

Tokens come flat: the K response tokens of some samples in one row, whatever sequence or micro-batch they were
computed in, with the sample each belongs to. A loss needs whole samples, never whole groups. π_old is the policy that
made the tokens (their behaviour log-probs), so that clipping corrects staleness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from policy_worker.errors import OwnCodeFailedError, SettingsError
from schema.util.own_code import OwnCodeError, is_own, load_function

LossType = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped here before they are exponentiated: e^20 is far beyond any meaningful ratio."""
GSPO_LOG_RATIO_MAX = 10.0
"""Upper bound of GSPO's log ratio before it is exponentiated."""


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens that the loss is computed from. All vectors are [K]; floating ones of one dtype.

    mask: true where the token counts. entropy: of the policy's distribution at the token; needs a gradient where
    `entropy_coeff` is not 0. sample: index of each token's sample, int64 in [0, n_samples). sample_tokens: |m_i| of
    that sample, floating. positive: whether its reward is above 0. ref_logprobs: of the reference model; needed where
    `kl_beta` is not 0. behaviour_logprobs: of the policy that made the tokens; None: that is π_old. weights:
    factors of the policy loss; None: 1. full_kl: to the reference over the vocabulary, if `kl_type` is "full".
    taught: what teachers add to the loss of each token; None without teachers."""

    logprobs: Tensor
    old_logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor
    sample: Tensor
    n_samples: int
    sample_tokens: Tensor
    positive: Tensor
    ref_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    weights: Tensor | None = None
    full_kl: Tensor | None = None
    taught: Tensor | None = None

    def inside(self) -> PolicyTokens:
        """The same with 0 for every number outside of the mask, so that no formula and no gradient meets NaN there.

        Masking what comes out of a formula is not enough: 0 · NaN in its backward pass is NaN again."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: torch.where(self.mask, value, torch.zeros_like(value))
                for name, value in values.items()
                if isinstance(value, Tensor) and value.is_floating_point() and name != "sample_tokens"
            },
        )


@dataclass(frozen=True)
class Clip:
    """1 − low ≤ ρ ≤ 1 + high; a negative one leaves its side open. `dual` > 1 bounds the loss of negative advantages
    at −dual · A. rho: ρ is truncated there instead of clipped (AIPO)."""

    low: float
    high: float
    dual: float
    rho: float | None = None

    def __call__(self, ratio: Tensor) -> Tensor:
        """The ratio inside the bounds."""
        return ratio.clamp(1 - self.low if self.low >= 0 else None, 1 + self.high if self.high >= 0 else math.inf)


@dataclass(frozen=True)
class TokenLoss:
    """Per-token results, [K]: the loss, the ratio it used, and where clipping decided it."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


# ---- policy losses, by name -------------------------------------------------------------------------------------

LossFn = Callable[[PolicyTokens, Clip], TokenLoss]
"""All numbers of the tokens are 0 outside of their mask."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered loss. loss_type: the aggregation that is part of its definition; None: the configured one."""

    loss_fn: LossFn
    loss_type: LossType | None


POLICY_LOSSES: dict[str, PolicyLoss] = {}
"""`train.train_policy.variant` to its loss."""


def policy_loss(*variants: str, loss_type: LossType | None = None) -> Callable[[LossFn], LossFn]:
    """Register a function as the policy loss of these variants."""

    def register(loss_fn: LossFn) -> LossFn:
        POLICY_LOSSES.update(dict.fromkeys(variants, PolicyLoss(loss_fn, loss_type)))
        return loss_fn

    return register


def policy_loss_of(variant: str) -> PolicyLoss:
    """Raises `SettingsError` for a variant that is not registered, or a user's function that cannot be loaded."""
    if is_own(variant):
        try:
            return PolicyLoss(_checked(load_function(variant), variant), None)
        except OwnCodeError as error:
            raise SettingsError(f"train.train_policy.variant = {variant!r}: {error}") from error
    if variant not in POLICY_LOSSES:
        known = ", ".join(POLICY_LOSSES)
        raise SettingsError(f"train.train_policy.variant = {variant!r} is not a policy loss; known are {known}")
    return POLICY_LOSSES[variant]


def _checked(loss_fn: LossFn, name: str) -> LossFn:
    """A user's loss, whose every answer is a `TokenLoss`, or its loss alone, [K]. Raises `OwnCodeFailedError`."""

    def run(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
        what, k = f"train.train_policy.variant = {name!r}", tokens.logprobs.shape
        try:
            answer = loss_fn(tokens, clip)
        except Exception as error:
            raise OwnCodeFailedError(f"{what} failed on {k[0]} tokens: {type(error).__name__}: {error}") from error
        if isinstance(answer, Tensor):
            answer = TokenLoss(answer, _ratio(tokens), torch.zeros_like(tokens.mask))
        if not isinstance(answer, TokenLoss):
            raise OwnCodeFailedError(f"{what} returned {type(answer).__name__}, not a tensor or a TokenLoss")
        for part in (answer.loss, answer.ratio, answer.clipped):
            if part.shape != k:
                raise OwnCodeFailedError(f"{what} returned shape {list(part.shape)} for {k[0]} tokens")
        if not bool(torch.where(tokens.mask, answer.loss, torch.zeros_like(answer.loss)).isfinite().all()):
            raise OwnCodeFailedError(f"{what} returned a loss that is NaN or infinite")
        if k[0] and not answer.loss.requires_grad:
            raise OwnCodeFailedError(f"{what} returned a loss without a gradient: nothing would be learned")
        return answer

    return run


@policy_loss("grpo", "dapo")
def grpo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """PPO's clipped surrogate with dual clip for A < 0: min(loss, −c A). DAPO's is GRPO's with unequal bounds.

    Sources: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; GRPO, arXiv 2402.03300, eq. 3;
    unequal bounds (clip-higher), DAPO, arXiv 2503.14476, eq. 10. With `rho` −min(ρ, rho) A instead: AIPO, LlamaRL,
    arXiv 2505.24034, eq. 5."""
    ratio = _ratio(tokens)
    advantages = tokens.advantages
    if clip.rho is not None:
        return TokenLoss(-ratio.clamp(max=clip.rho) * advantages, ratio, ratio > clip.rho)
    loss, clipped = _clipped(ratio, advantages, clip)
    bound = -clip.dual * advantages
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return TokenLoss(loss, ratio, clipped | (negative & (bound < -ratio * advantages)))


@policy_loss("gspo", loss_type="seq-mean-token-mean")
def gspo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """One ratio per sequence, s = mean over its tokens of (log π − log π_old), in the token form

        exp(clamp(log π − sg(log π) + sg(s), max 10))

    whose value is the sequence's ratio and whose gradient is each token's own. Clipped, no dual clip. Its loss is a
    mean over sequences by definition, whatever `loss_type` says.
    Source: GSPO, arXiv 2507.18071, eq. 7 and 14 to 16."""
    log_ratio = tokens.logprobs - tokens.old_logprobs
    mean = segment_mean(log_ratio, tokens.mask, tokens.sample, tokens.n_samples)[tokens.sample].detach()
    ratio = (log_ratio - log_ratio.detach() + mean).clamp(max=GSPO_LOG_RATIO_MAX).exp()
    loss, clipped = _clipped(ratio, tokens.advantages, clip)
    return TokenLoss(loss, ratio, clipped)


@policy_loss("cispo")
def cispo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """−sg(clip(ρ)) A log π: the weight is clipped, and every token keeps its gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5."""
    ratio = _ratio(tokens)
    weight = clip(ratio.detach())
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ratio, weight != ratio)


@policy_loss("reinforce")
def reinforce(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """−A log π: no ratio, so no correction for staleness. Source: Williams 1992, "REINFORCE"."""
    return TokenLoss(-tokens.advantages * tokens.logprobs, _ratio(tokens), torch.zeros_like(tokens.mask))


@policy_loss("geo_mean", loss_type="seq-mean-token-mean")
def geo_mean(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """−A (Π ρ_t)^(1/n) of each sequence, with log ρ_t clipped to [−ε_low, ε_high] on the side that A points to.

    Each token of a sequence has the sequence's loss, with its mean advantage; the mean over its tokens is that again.
    Source: GMPO, arXiv 2507.20673, eq. 4, with the clip of verl's `geo_mean`."""
    log_ratio, advantages = _log_ratio(tokens), tokens.advantages
    sign = advantages.sign()
    bounded = log_ratio.clamp(-clip.low if clip.low >= 0 else None, clip.high if clip.high >= 0 else math.inf)
    kept = sign * torch.minimum(sign * log_ratio, sign * bounded)
    segments = (tokens.mask, tokens.sample, tokens.n_samples)
    ratio = segment_mean(kept, *segments).exp()[tokens.sample]
    mean = segment_mean(advantages, *segments)[tokens.sample]
    return TokenLoss(-mean * ratio, log_ratio.exp(), (kept != log_ratio) & (sign != 0))


SAPO_TEMPERATURES = 1.0, 1.05
"""τ of SAPO's gate for tokens of positive and of other advantages: those of the paper."""


@policy_loss("sapo")
def sapo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """−f(ρ) A, f(ρ) = 4 σ(τ (ρ − 1)) / τ: a soft gate in place of the clip.

    Source: SAPO, arXiv 2511.20347, eq. 5 and 6."""
    ratio, advantages = _ratio(tokens), tokens.advantages
    up, down = SAPO_TEMPERATURES
    tau = torch.where(advantages > 0, torch.full_like(ratio, up), torch.full_like(ratio, down))
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TokenLoss(-gate * advantages, ratio, torch.zeros_like(tokens.mask))


def _ratio(tokens: PolicyTokens) -> Tensor:
    """ρ."""
    return _log_ratio(tokens).exp()


def _log_ratio(tokens: PolicyTokens) -> Tensor:
    """log ρ = clamp(log π − log π_old, ±20)."""
    return (tokens.logprobs - tokens.old_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(−min(ρA, clip(ρ)A), where the clipped branch is the smaller one)."""
    plain = ratio * advantages
    bounded = clip(ratio) * advantages
    return -torch.minimum(plain, bounded), bounded < plain


# ---- under a mask: nothing outside of it matters, not even NaN --------------------------------------------------
# `torch.where` and not a product: `0 * NaN` is NaN, in the value as in the gradient.


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Σ of `x` where `mask` is true; both of one shape, mask bool. Gradient 0 outside of the mask."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest `x` under the mask; 0 if the mask is empty (for quantities that are never negative)."""
    return torch.where(mask, x, torch.zeros_like(x)).amax() if x.numel() else x.new_zeros(())


def segment_mean(x: Tensor, mask: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """Masked mean of each segment, [n_segments].

    x: values, [K]. mask: bool, [K]. segment: which segment each value belongs to, int64 [K], in [0, n_segments)."""
    kept = torch.where(mask, x, torch.zeros_like(x))
    sums = x.new_zeros(n_segments).index_add(0, segment, kept)
    counts = x.new_zeros(n_segments).index_add(0, segment, mask.to(x.dtype))
    return sums / counts.clamp(min=1)
