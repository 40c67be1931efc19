"""Policy losses per token, by registry.

    ρ = exp(clamp(log π − log π_old, ±20)),  loss = −min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A), …

Tokens come flat: the K response tokens of some samples side by side, whatever sequence or micro-batch they were
computed in (shape suffix `_K`), with the sample each belongs to. A loss needs whole samples, never whole groups.
π_old is the policy that made the tokens (their behaviour log-probs), so that clipping corrects staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_worker.algorithms.kl import LOG_RATIO_BOUND
from policy_worker.algorithms.masked import segment_mean

GSPO_LOG_RATIO_MAX = 10.0
"""Upper bound of GSPO's log ratio before it is exponentiated."""


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss is computed from. All vectors are [K]; floating ones of one dtype.

    mask: true where the token counts. sample: index of each token's sample, int64 in [0, n_samples).
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sample: Tensor
    n_samples: int


@dataclass(frozen=True)
class Clip:
    """1 − low ≤ ρ ≤ 1 + high; `dual` > 1 bounds the loss of negative advantages at −dual · A."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token results, [K]: the loss, the ratio it used, and where clipping decided it."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


PolicyLossFunction = Callable[[PolicyTokens, Clip], PolicyLoss]


def _log_ratio(tokens: PolicyTokens) -> Tensor:
    """log π − log π_old, 0 outside of the mask (so that no NaN there reaches a gradient)."""
    difference = tokens.logprobs - tokens.old_logprobs
    return torch.where(tokens.mask, difference, torch.zeros_like(difference))


def _clipped(ratio: Tensor, tokens: PolicyTokens, clip: Clip) -> tuple[Tensor, Tensor]:
    """(−min(ρA, clip(ρ)A), where the clipped branch is the smaller one)."""
    advantages = torch.where(tokens.mask, tokens.advantages, torch.zeros_like(tokens.advantages))
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    return -torch.minimum(plain, bounded), bounded < plain


def grpo(tokens: PolicyTokens, clip: Clip) -> PolicyLoss:
    """PPO's clipped surrogate with dual clip for A < 0: min(loss, −c A).

    Sources: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; GRPO, arXiv 2402.03300, eq. 3;
    unequal bounds (clip-higher), DAPO, arXiv 2503.14476, eq. 10.
    """
    ratio = _log_ratio(tokens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss, clipped = _clipped(ratio, tokens, clip)
    advantages = torch.where(tokens.mask, tokens.advantages, torch.zeros_like(tokens.advantages))
    bound = -clip.dual * advantages
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return PolicyLoss(loss, ratio, clipped | (negative & (bound < -ratio * advantages)))


def gspo(tokens: PolicyTokens, clip: Clip) -> PolicyLoss:
    """One ratio per sequence, s = mean over its tokens of (log π − log π_old), in the token form

        exp(clamp(log π − sg(log π) + sg(s), max 10))

    whose value is the sequence's ratio and whose gradient is each token's own. Clipped, no dual clip.
    Source: GSPO, arXiv 2507.18071, eq. 7 and 14 to 16.
    """
    log_ratio = _log_ratio(tokens)
    mean = segment_mean(log_ratio, tokens.mask, tokens.sample, tokens.n_samples)[tokens.sample].detach()
    ratio = (log_ratio - log_ratio.detach() + mean).clamp(max=GSPO_LOG_RATIO_MAX).exp()
    loss, clipped = _clipped(ratio, tokens, clip)
    return PolicyLoss(loss, ratio, clipped)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = {"grpo": grpo, "dapo": grpo, "gspo": gspo}
"""`train.train_policy.variant` to its loss. DAPO's loss is GRPO's with unequal clip bounds."""
