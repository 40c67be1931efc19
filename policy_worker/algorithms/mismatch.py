"""How far the policy is from the one that made the tokens, measured always and apart for these causes:

engine      tokens of the weights that are trained now: trainer and inference engine compute differently
stale       tokens of older weights: the policy has moved since, which comes on top
unreplayed  as engine, where the engine's experts are replayed, and would not be; of some tokens, now and then

w = exp(clamp(log π − log π_behaviour, ±20)) of each token, before any truncation
k1 = mean(−log w),  k3 = mean(w − 1 − log w),  ess = 1 / mean((w / mean w)²),  ratio_max = max w,
cut = share of w above the cap
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from policy_worker.algorithms.losses import LOG_RATIO_BOUND, masked_max, masked_sum
from policy_worker.algorithms.objective import k3

CAUSES = ("engine", "stale", "unreplayed")


def mismatch_sums(logprobs: Tensor, made_by: Tensor, causes: Mapping[str, Tensor], cap: float) -> dict[str, Tensor]:
    """Sums over tokens, for `mismatch_metrics`; all [K]. causes: by name which tokens it is measured of."""
    log_ratio = (logprobs - made_by).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = log_ratio.exp()
    sums: dict[str, Tensor] = {}
    for cause, mask in causes.items():
        sums |= {
            f"{cause}_tokens": mask.sum(),
            f"{cause}_k1": masked_sum(-log_ratio, mask),
            f"{cause}_k3": masked_sum(k3(made_by, logprobs), mask),
            f"{cause}_w": masked_sum(weights, mask),
            f"{cause}_w2": masked_sum(weights.square(), mask),
            f"{cause}_cut": (mask & (weights > cap)).sum(),
            f"max_{cause}": masked_max(weights, mask),
        }
    return sums


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """`mismatch/engine_k1` and the others, of the sums over all ranks; nothing for a cause without tokens."""
    metrics: dict[str, float] = {}
    for cause in CAUSES:
        n = sums.get(f"{cause}_tokens", 0)
        if n:
            metrics |= {
                f"mismatch/{cause}_k1": sums[f"{cause}_k1"] / n,
                f"mismatch/{cause}_k3": sums[f"{cause}_k3"] / n,
                f"mismatch/{cause}_ess": sums[f"{cause}_w"] ** 2 / (n * sums[f"{cause}_w2"]),
                f"mismatch/{cause}_ratio_max": sums[f"max_{cause}"],
                f"mismatch/{cause}_cut": sums[f"{cause}_cut"] / n,
            }
    return metrics
