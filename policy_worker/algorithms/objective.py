"""The loss of reinforcement learning on some tokens of an optimizer step: policy loss, likelihood, entropy.

    L = Σ_k w_k (ℓ_k − c_H H_k) + c_nll / N⁺ · Σ_{k: score > 0} (−log π_k)

The parts that different micro-batches and ranks compute add up to the loss of the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from policy_worker.algorithms.aggregation import LossType, StepTotals, token_weights
from policy_worker.algorithms.kl import k3
from policy_worker.algorithms.masked import masked_max, masked_sum
from policy_worker.algorithms.policy_loss import POLICY_LOSSES, Clip, PolicyTokens


@dataclass(frozen=True)
class Objective:
    """The coefficients of the loss; names as in `[train.train_policy]`."""

    variant: str
    clip: Clip
    loss_type: LossType
    unbiased_loss_max_tokens: int | None = None
    entropy_coeff: float = 0.0
    positive_nll_coef: float | None = None

    @property
    def aggregation(self) -> LossType:
        """GSPO's loss is a mean over sequences by definition, whatever `loss_type` says."""
        return "seq-mean-token-mean" if self.variant == "gspo" else self.loss_type


@dataclass(frozen=True)
class SampleFacts:
    """What the table says of each token's sample, [K]: its token count |m_i|, and whether its score is above 0."""

    tokens: Tensor
    positive: Tensor


def objective(
    tokens: PolicyTokens, entropy: Tensor, facts: SampleFacts, totals: StepTotals, how: Objective
) -> tuple[Tensor, dict[str, Tensor]]:
    """(this part's share of the loss, sums for the metrics).

    Args:
        entropy: of the policy's distribution at each token, [K]; needs a gradient if `entropy_coeff` is not 0.

    Returns:
        A scalar to call `backward` on, and detached scalars: sums over tokens ("loss" is already the share; keys
        that begin with "max_" are maxima).
    """
    policy = POLICY_LOSSES[how.variant](tokens, how.clip)
    weights = token_weights(how.aggregation, facts.tokens, totals, how.unbiased_loss_max_tokens)
    per_token = policy.loss
    if how.entropy_coeff:
        per_token = per_token - how.entropy_coeff * entropy
    loss = masked_sum(weights * per_token, tokens.mask)
    if how.positive_nll_coef:
        nll = masked_sum(-tokens.logprobs, tokens.mask & facts.positive)
        loss = loss + how.positive_nll_coef / max(totals.positive_tokens, 1) * nll
    return loss, _sums(loss, policy.ratio, policy.clipped, entropy, tokens)


def _sums(
    loss: Tensor, ratio: Tensor, clipped: Tensor, entropy: Tensor, tokens: PolicyTokens
) -> dict[str, Tensor]:
    mask = tokens.mask
    return {
        "loss": loss.detach(),
        "entropy": masked_sum(entropy.detach(), mask),
        "clip_fraction": masked_sum(clipped.to(loss.dtype), mask),
        "behaviour_kl": masked_sum(k3(tokens.old_logprobs, tokens.logprobs.detach()), mask),
        "max_ratio": masked_max(ratio.detach(), mask),
    }


def mean_metrics(sums: Mapping[str, float], n_tokens: int) -> dict[str, float]:
    """Metrics by their public names from sums over all parts: means per token, the loss and the maximum as is."""
    n = max(n_tokens, 1)
    return {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / n,
        "clip_fraction": sums["clip_fraction"] / n,
        "behaviour_kl": sums["behaviour_kl"] / n,
        "ratio_max": sums["max_ratio"],
    }
