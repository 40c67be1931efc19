"""Estimates of the KL divergence from log-probs of the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped here before they are exponentiated: e^20 is far beyond any meaningful ratio."""
K3_BOUND = 10.0
"""k3 is clamped here, so that one token with a broken log-prob cannot dominate a mean."""


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Per-token estimate of KL(p ‖ q) on tokens sampled from p: e^d − 1 − d, d = log q − log p, never negative.

    `expm1` keeps it exact near d = 0, where e^d − 1 would lose every digit in float32.
    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3.
    """
    d = (log_q - log_p).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(d) - d).clamp(-K3_BOUND, K3_BOUND)
