"""From token losses to one number, however the batch was cut.

Every aggregation is a weight per token, Σ_k w_k ℓ_k, and the weights depend only on facts of the whole optimizer
step: N tokens, M samples, and the token count |m_i| of the token's own sample. So the sum over micro-batches,
ranks and replicas is the loss, and no gradient depends on the cut.

    token-mean            w = 1 / N
    seq-mean-token-sum    w = 1 / M
    seq-mean-token-mean   w = 1 / (M |m_i|),  or 1 / (M L) with `unbiased_loss_max_tokens` = L
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole optimizer step: all micro-batches, ranks and replicas.

    tokens: N, tokens that count. samples: M, samples that count. positive_tokens: tokens of those samples whose
    score is above 0.
    """

    tokens: int
    samples: int
    positive_tokens: int = 0


def token_weights(
    loss_type: LossType, sample_tokens: Tensor, totals: StepTotals, max_tokens: int | None = None
) -> Tensor:
    """w_k of each token, [K].

    Args:
        sample_tokens: |m_i| of the sample that each token belongs to, floating, [K].
        max_tokens: L, with "seq-mean-token-mean" only.

    Sources: token-mean, DAPO, arXiv 2503.14476, eq. 12; seq-mean-token-mean, GRPO, arXiv 2402.03300, eq. 3;
    the constant L, Dr. GRPO, arXiv 2503.20783, §3.1.
    """
    if loss_type == "token-mean":
        return torch.full_like(sample_tokens, 1 / max(totals.tokens, 1))
    if loss_type == "seq-mean-token-sum":
        return torch.full_like(sample_tokens, 1 / max(totals.samples, 1))
    if max_tokens is not None:
        return torch.full_like(sample_tokens, 1 / (max(totals.samples, 1) * max_tokens))
    return 1 / (max(totals.samples, 1) * sample_tokens.clamp(min=1))
