"""On-policy distillation: what a teacher's distribution says of the tokens that the policy sampled.

With π the policy, q the teacher, y the sampled token, w the teacher's weight:

    reverse_kl_advantage    A += −w (log π_old(y) − log q(y))               each token's own, no discount
    reverse_kl_k2           loss += w (log π(y) − log q(y))² / 2            its mean gradient is that of KL(π ‖ q)
    reverse_kl_k3           loss += w (e^d − 1 − d), d = log q − log π      its mean value is KL(π ‖ q)
    reverse_kl_full         loss += w Σ_v π(v) (log π(v) − log q(v))        see `model.logprobs.token_kl`
    top_k_jsd               loss += w JSD_β, over the teacher's k likeliest tokens and everything else as one

Losses of tokens are aggregated like the policy loss. Sources: on-policy distillation and the generalised divergence,
GKD, arXiv 2306.13649; the reverse KL as advantage, K. Lu, "On-Policy Distillation" (Thinking Machines, 2025);
estimators k2 and k3, J. Schulman, "Approximating KL Divergence" (2020).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from policy_worker.algorithms.losses import LOG_RATIO_BOUND
from policy_worker.algorithms.objective import kl_penalty

LEAST_REST = 1e-10
"""Least probability outside of the teacher's likeliest tokens: below, it is rounding."""


def bounded(teacher: Tensor, logprobs: Tensor) -> Tensor:
    """The teacher's log-probs, no further from the policy's than ±20: a token that it rules out is one of e^−20 of π.

    Bounds without gradient, so that of log π − log q stays 1."""
    detached = logprobs.detach()
    return torch.minimum(torch.maximum(teacher, detached - LOG_RATIO_BOUND), detached + LOG_RATIO_BOUND)


def reverse_kl_advantage(old_logprobs: Tensor, teacher: Tensor) -> Tensor:
    """log q(y) − log π_old(y) of each token, [K], bounded by ±20."""
    return bounded(teacher, old_logprobs) - old_logprobs


def reverse_kl_estimate(logprobs: Tensor, teacher: Tensor, loss: str) -> Tensor:
    """Estimates of KL(π ‖ q) on sampled tokens, [K], with gradient. loss: "reverse_kl_k2" or "reverse_kl_k3"."""
    return kl_penalty(logprobs, bounded(teacher, logprobs), "k2" if loss == "reverse_kl_k2" else "k3")


def top_k_jsd(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of each token, [K], in [0, H(β)], with gradient through `policy`.

        β KL(q ‖ m) + (1 − β) KL(π ‖ m),    m = β q + (1 − β) π

    over k + 1 outcomes: the teacher's k likeliest tokens, and the rest of the vocabulary as one (the tail). The tail
    compares how much probability is outside, not where, so this is a lower bound of the divergence over the
    vocabulary, and 0 where the k probabilities agree. With k = vocabulary the tail is empty and it is exact.

    policy, teacher: log-probs of these tokens, [K, k], of distributions over the whole vocabulary."""
    q, p = _with_rest(teacher), _with_rest(policy)
    m = torch.logaddexp(q + math.log(beta), p + math.log1p(-beta))
    return beta * (q.exp() * (q - m)).sum(1) + (1 - beta) * (p.exp() * (p - m)).sum(1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """[K, k + 1]: the last is the log-prob of all other tokens together."""
    rest = 1 - logprobs.exp().sum(1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=LEAST_REST).log()], 1)
