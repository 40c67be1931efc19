"""From the losses of tokens to one number: aggregation, entropy, KL, likelihood of positive samples.

    L = Σ_k w_k (ℓ_k − c_H H_k + β KL_k) + c_nll / N⁺ · Σ_{k: reward > 0} (−log π_k)

The weights w_k depend only on facts of the whole optimizer step (`Normalizers`) and the token count |m_i| of the
token's own sample. So the sum over micro-batches, ranks and replicas is the loss, and no gradient depends on the cut:

    token-mean            w = 1 / N
    seq-mean-token-sum    w = 1 / M
    seq-mean-token-mean   w = 1 / (M |m_i|),  or 1 / (M L) with `unbiased_loss_max_tokens` = L
    token-sum             w = 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from policy_worker.algorithms.losses import (
    LOG_RATIO_BOUND,
    Clip,
    LossType,
    PolicyTokens,
    _ratio,
    masked_max,
    masked_sum,
    policy_loss_of,
)
from schema.config import GrpoConfig
from schema.util.own_code import is_own

KlType = Literal["k1", "abs", "k2", "k3", "full"]

K3_BOUND = 10.0
"""k3 is clamped here in losses and rewards, so that one token with a broken log-prob cannot dominate a mean; metrics
show what there is."""


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
    reward is above 0."""

    tokens: int
    samples: int
    positive_tokens: int = 0


def policy_objective(tokens: PolicyTokens, norm: Normalizers, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
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

    Source: the clipped value loss of PPO's reference implementation (Engstrom et al., arXiv 2005.12729, §3)."""
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


@dataclass(frozen=True)
class Correction:
    """Weights of the policy loss between π_old, recomputed by the trainer, and the policy that made the tokens.

    kind: a ratio for each token, or the product over those of its sequence that count. cap: where weights are cut.
    drops: a weight above the cap is 0 instead, so the token has no loss (it still counts in N).
    Sources: decoupled PPO, arXiv 2505.24298 (AReaL), eq. 5; truncated importance sampling, as verl has it."""

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
            log_ratio = log_ratio.new_zeros(tokens.n_samples).index_add(0, tokens.sample, log_ratio)[tokens.sample]
        weights = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if self.cap is None:
            return weights
        return torch.where(weights > self.cap, torch.zeros_like(weights) if self.drops else self.cap, weights)


def token_weights(
    loss_type: LossType, sample_tokens: Tensor, norm: Normalizers, max_tokens: int | None = None
) -> Tensor:
    """w_k of each token, [K].

    sample_tokens: |m_i| of the sample that each token belongs to, floating, [K]. max_tokens: L, with
    "seq-mean-token-mean" only.

    Sources: token-mean, DAPO, arXiv 2503.14476, eq. 12; seq-mean-token-mean, GRPO, arXiv 2402.03300, eq. 3;
    the constant L, Dr. GRPO, arXiv 2503.20783, §3.1."""
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
    "full" is no estimate of one token's: see `policy_worker.model.logits.logprobs.token_kl`.
    Source: J. Schulman, "Approximating KL Divergence" (2020)."""
    if kind == "k3":
        return k3(logprobs, ref_logprobs).clamp(max=K3_BOUND)
    d = logprobs - ref_logprobs
    return {"k1": lambda: d, "abs": d.abs, "k2": lambda: d.square() / 2}[kind]()


def adapted(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """The next coefficient of an adaptive KL: β (1 + clip(kl / target − 1, ±0.2) · samples / horizon).

    Samples beyond the horizon count as the horizon: β stays positive, and changes by a fifth at most.
    Source: Ziegler et al., arXiv 1909.08593, §2.2."""
    return beta * (1 + max(-0.2, min(kl / target - 1, 0.2)) * min(samples / horizon, 1.0))


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Per-token estimate of KL(p ‖ q) on tokens sampled from p: e^d − 1 − d, d = log q − log p, never negative.

    `expm1` keeps it exact near d = 0, where e^d − 1 would lose every digit in float32. d is clamped to ±20, so that
    a sum stays finite.
    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3."""
    d = (log_q - log_p).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(d) - d
