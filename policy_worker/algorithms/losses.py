"""The loss of reinforcement learning on some tokens of an optimizer step: policy loss, likelihood, entropy, KL.

    L = Σ_k w_k (ℓ_k − c_H H_k + β KL_k) + c_nll / N⁺ · Σ_{k: reward > 0} (−log π_k)

    ρ = exp(clamp(log π − log π_old, ±20)),  ℓ = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A), …

The weights w_k depend only on facts of the whole optimizer step (`Normalizers`) and the token count |m_i| of the
token's own sample. So the sum over micro-batches, ranks and replicas is the loss, and no gradient depends on the cut:

    token-mean            w = 1 / N
    seq-mean-token-sum    w = 1 / M
    seq-mean-token-mean   w = 1 / (M |m_i|),  or 1 / (M L) with `unbiased_loss_max_tokens` = L
    token-sum             w = 1

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
from schema.config import GrpoConfig
from schema.util.own_code import OwnCodeError, is_own, load_function

LossType = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]
KlType = Literal["k1", "abs", "k2", "k3", "full"]

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped here before they are exponentiated: e^20 is far beyond any meaningful ratio."""
K3_BOUND = 10.0
"""k3 is clamped here in losses and rewards, so that one token with a broken log-prob cannot dominate a mean; metrics
show what there is."""
GSPO_LOG_RATIO_MAX = 10.0
"""Upper bound of GSPO's log ratio before it is exponentiated."""


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss is computed from. All vectors are [K]; floating ones of one dtype.

    mask: true where the token counts. entropy: of the policy's distribution at the token; needs a gradient where
    `entropy_coeff` is not 0. sample: index of each token's sample, int64 in [0, n_samples). sample_tokens: |m_i| of
    that sample, floating. positive: whether its reward is above 0. ref_logprobs: of the reference model; needed where
    `kl_beta` is not 0. behaviour_logprobs: of the policy that made the tokens; None: that is π_old. weights:
    factors of the policy loss; None: 1. full_kl: to the reference over the vocabulary, if `kl_type` is "full".
    taught: what teachers add to the loss of each token; None without teachers.
    """

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

        Masking what comes out of a formula is not enough: 0 · NaN in its backward pass is NaN again.
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: torch.where(self.mask, value, torch.zeros_like(value))
                for name, value in found.items()
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
        return ratio.clamp(
            1 - self.low if self.low >= 0 else None, 1 + self.high if self.high >= 0 else math.inf
        )


@dataclass(frozen=True)
class LossConfig:
    """The coefficients of the loss; names as in `[train.train_policy]`."""

    variant: str
    clip: Clip
    loss_type: LossType
    unbiased_loss_max_tokens: int | None = None
    entropy_coeff: float = 0.0
    positive_nll_coef: float | None = None
    kl_beta: float = 0.0
    kl_type: KlType = "k3"
    unbiased_kl_estimate: bool = False

    @staticmethod
    def of_config(grpo: GrpoConfig) -> LossConfig:
        """Read `[train.train_policy]`. Raises `SettingsError` for an unknown variant."""
        policy_loss_of(grpo.variant)
        return LossConfig(
            variant=grpo.variant,
            clip=Clip(grpo.epsilon_low, grpo.epsilon_high, grpo.lower_bound_ratio, grpo.aipo_rho),
            loss_type=grpo.loss_type,
            unbiased_loss_max_tokens=grpo.unbiased_loss_max_tokens,
            entropy_coeff=grpo.entropy_coeff,
            positive_nll_coef=grpo.positive_nll_coef,
            kl_beta=grpo.kl_beta,
            kl_type=grpo.kl_type,
            unbiased_kl_estimate=grpo.unbiased_kl_estimate,
        )

    @property
    def vanishes_with_advantage(self) -> bool:
        """Whether a token of advantage 0 adds nothing to loss and gradient, but for the likelihood of positives."""
        return not (is_own(self.variant) or self.entropy_coeff or self.kl_beta)


@dataclass(frozen=True)
class Normalizers:
    """Counts over the whole optimizer step: all micro-batches, ranks and replicas.

    tokens: N, tokens that count. samples: M, samples that count. positive_tokens: N⁺, tokens of those samples whose
    reward is above 0.
    """

    tokens: int
    samples: int
    positive_tokens: int = 0


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
        raise SettingsError(
            f"train.train_policy.variant = {variant!r} is not a policy loss; known are {known}"
        )
    return POLICY_LOSSES[variant]


def _checked(loss_fn: LossFn, name: str) -> LossFn:
    """A user's loss, whose every answer is a `TokenLoss`, or its loss alone, [K]. Raises `OwnCodeFailedError`."""

    def run(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
        what, k = f"train.train_policy.variant = {name!r}", tokens.logprobs.shape
        try:
            found = loss_fn(tokens, clip)
        except Exception as error:
            raise OwnCodeFailedError(
                f"{what} failed on {k[0]} tokens: {type(error).__name__}: {error}"
            ) from error
        if isinstance(found, Tensor):
            found = TokenLoss(found, _ratio(tokens), torch.zeros_like(tokens.mask))
        if not isinstance(found, TokenLoss):
            raise OwnCodeFailedError(f"{what} returned {type(found).__name__}, not a tensor or a TokenLoss")
        for part in (found.loss, found.ratio, found.clipped):
            if part.shape != k:
                raise OwnCodeFailedError(f"{what} returned shape {list(part.shape)} for {k[0]} tokens")
        if not bool(torch.where(tokens.mask, found.loss, torch.zeros_like(found.loss)).isfinite().all()):
            raise OwnCodeFailedError(f"{what} returned a loss that is NaN or infinite")
        if k[0] and not found.loss.requires_grad:
            raise OwnCodeFailedError(f"{what} returned a loss without a gradient: nothing would be learned")
        return found

    return run


@policy_loss("grpo", "dapo")
def grpo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """PPO's clipped surrogate with dual clip for A < 0: min(loss, −c A). DAPO's is GRPO's with unequal bounds.

    Sources: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; GRPO, arXiv 2402.03300, eq. 3;
    unequal bounds (clip-higher), DAPO, arXiv 2503.14476, eq. 10. With `rho` −min(ρ, rho) A instead: AIPO, LlamaRL,
    arXiv 2505.24034, eq. 5.
    """
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
    Source: GSPO, arXiv 2507.18071, eq. 7 and 14 to 16.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    mean = segment_mean(log_ratio, tokens.mask, tokens.sample, tokens.n_samples)[tokens.sample].detach()
    ratio = (log_ratio - log_ratio.detach() + mean).clamp(max=GSPO_LOG_RATIO_MAX).exp()
    loss, clipped = _clipped(ratio, tokens.advantages, clip)
    return TokenLoss(loss, ratio, clipped)


@policy_loss("cispo")
def cispo(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
    """−sg(clip(ρ)) A log π: the weight is clipped, and every token keeps its gradient.

    Source: CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
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
    Source: GMPO, arXiv 2507.20673, eq. 4, with the clip of verl's `geo_mean`.
    """
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

    Source: SAPO, arXiv 2511.20347, eq. 5 and 6.
    """
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


# ---- from token losses to one number ----------------------------------------------------------------------------


def policy_objective(
    tokens: PolicyTokens, norm: Normalizers, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(this part's share of the optimizer step's loss, sums for the metrics).

    Returns:
        A scalar to call `backward` on, and detached scalars: sums over tokens ("loss" is already the share; keys
        that begin with "max_" are maxima).
    """
    policy, tokens = policy_loss_of(config.variant), tokens.inside()
    result = policy.loss_fn(tokens, config.clip)
    weights = token_weights(
        policy.loss_type or config.loss_type, tokens.sample_tokens, norm, config.unbiased_loss_max_tokens
    )
    per_token = result.loss if tokens.weights is None else tokens.weights * result.loss
    if config.entropy_coeff:
        per_token = per_token - config.entropy_coeff * tokens.entropy
    if tokens.taught is not None:
        per_token = per_token + tokens.taught
    if config.kl_beta:
        assert tokens.ref_logprobs is not None
        kl = tokens.full_kl
        if kl is None:
            kl = kl_penalty(tokens.logprobs, tokens.ref_logprobs, config.kl_type)
        if config.unbiased_kl_estimate:
            kl = _ratio(tokens) * kl
        per_token = per_token + config.kl_beta * kl
    loss = masked_sum(weights * per_token, tokens.mask)
    if config.positive_nll_coef:
        nll = masked_sum(-tokens.logprobs, tokens.mask & tokens.positive)
        loss = loss + config.positive_nll_coef / max(norm.positive_tokens, 1) * nll
    made_by = tokens.old_logprobs if tokens.behaviour_logprobs is None else tokens.behaviour_logprobs
    parts = {}
    if tokens.weights is not None:
        parts["correction_weight"] = masked_sum(tokens.weights, tokens.mask)
    if tokens.ref_logprobs is not None:
        parts["reference_kl"] = masked_sum(k3(tokens.logprobs.detach(), tokens.ref_logprobs), tokens.mask)
    return loss, parts | {
        "loss": loss.detach(),
        "entropy": masked_sum(tokens.entropy.detach(), tokens.mask),
        "clip_fraction": masked_sum(result.clipped.to(loss.dtype), tokens.mask),
        "behaviour_kl": masked_sum(k3(made_by, tokens.logprobs.detach()), tokens.mask),
        "max_ratio": masked_max(result.ratio.detach(), tokens.mask),
    }


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ max((v − R)², (v_old + clip(v − v_old, ± c) − R)²) of each token, [K]; all [K].

    Source: the clipped value loss of PPO's reference implementation (Engstrom et al., arXiv 2005.12729, §3).
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


@dataclass(frozen=True)
class Correction:
    """Weights of the policy loss between π_old, recomputed by the trainer, and the policy that made the tokens.

    kind: a ratio for each token, or the product over those of its sequence that count. cap: where weights are cut.
    drops: a weight above the cap is 0 instead, so the token has no loss (it still counts in N).
    Sources: decoupled PPO, arXiv 2505.24298 (AReaL), eq. 5; truncated importance sampling, as verl has it.
    """

    kind: Literal["token", "sequence"]
    cap: float | None
    drops: bool = False

    @staticmethod
    def of_config(grpo: GrpoConfig) -> Correction | None:
        """Read `[train.train_policy]`; None: the weights are one."""
        if grpo.use_decoupled_loss:
            return Correction(kind="token", cap=grpo.behav_imp_weight_cap, drops=True)
        correction = grpo.rollout_correction
        return None if correction.weights == "none" else Correction(correction.weights, correction.cap)

    def weights(self, tokens: PolicyTokens) -> Tensor:
        """exp(clamp(log π_old − log π_behaviour, ±20)) of each token or summed over its sequence, capped; [K]."""
        assert tokens.behaviour_logprobs is not None
        difference = tokens.old_logprobs - tokens.behaviour_logprobs
        log_ratio = torch.where(tokens.mask, difference, torch.zeros_like(difference))
        if self.kind == "sequence":
            log_ratio = log_ratio.new_zeros(tokens.n_samples).index_add(0, tokens.sample, log_ratio)[
                tokens.sample
            ]
        weights = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if self.cap is None:
            return weights
        return torch.where(weights > self.cap, torch.zeros_like(weights) if self.drops else self.cap, weights)


def token_weights(
    loss_type: LossType, sample_tokens: Tensor, norm: Normalizers, max_tokens: int | None = None
) -> Tensor:
    """w_k of each token, [K].

    Args:
        sample_tokens: |m_i| of the sample that each token belongs to, floating, [K].
        max_tokens: L, with "seq-mean-token-mean" only.

    Sources: token-mean, DAPO, arXiv 2503.14476, eq. 12; seq-mean-token-mean, GRPO, arXiv 2402.03300, eq. 3;
    the constant L, Dr. GRPO, arXiv 2503.20783, §3.1.
    """
    if loss_type == "token-sum":
        return torch.ones_like(sample_tokens)
    if loss_type == "token-mean":
        return torch.full_like(sample_tokens, 1 / max(norm.tokens, 1))
    if loss_type == "seq-mean-token-sum":
        return torch.full_like(sample_tokens, 1 / max(norm.samples, 1))
    if max_tokens is not None:
        return torch.full_like(sample_tokens, 1 / (max(norm.samples, 1) * max_tokens))
    return 1 / (max(norm.samples, 1) * sample_tokens.clamp(min=1))


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) on tokens sampled from π, [K]: d, |d|, d² / 2 or k3, d = log π − log π_ref.

    k3 is clamped at `K3_BOUND`.
    "full" is no estimate of one token's: see `policy_worker.model.logprobs.token_kl`.
    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    if kind == "k3":
        return k3(logprobs, ref_logprobs).clamp(max=K3_BOUND)
    d = logprobs - ref_logprobs
    return {"k1": lambda: d, "abs": d.abs, "k2": lambda: d.square() / 2}[kind]()


def adapted(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient of an adaptive KL: β (1 + clip(kl / target − 1, ±0.2) · samples / horizon).

    Samples beyond the horizon count as the horizon: β stays positive, and changes by a fifth at most.
    Source: Ziegler et al., arXiv 1909.08593, §2.2.
    """
    return beta * (1 + max(-0.2, min(kl / target - 1, 0.2)) * min(samples / horizon, 1.0))


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Per-token estimate of KL(p ‖ q) on tokens sampled from p: e^d − 1 − d, d = log q − log p, never negative.

    `expm1` keeps it exact near d = 0, where e^d − 1 would lose every digit in float32. d is clamped to ±20, so that
    a sum stays finite.
    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3.
    """
    d = (log_q - log_p).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(d) - d


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

    Args:
        x: values, [K]. mask: bool, [K].
        segment: which segment each value belongs to, int64 [K], in [0, n_segments).
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    sums = x.new_zeros(n_segments).index_add(0, segment, kept)
    counts = x.new_zeros(n_segments).index_add(0, segment, mask.to(x.dtype))
    return sums / counts.clamp(min=1)
