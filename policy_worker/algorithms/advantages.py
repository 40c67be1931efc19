"""Advantages of the samples of a batch, from their scores alone.

Outcome estimators: one score per sample in, one advantage per sample out, spread over its response tokens by the
loss. They work on plain numbers (float64), since every rank knows the whole table of a step: no communication.
An estimator of one's own is a function of the same signature, put into `ESTIMATORS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Estimator = Callable[[Sequence[Sequence[float]], bool], list[list[float]]]
"""(scores by group, unbiased) -> advantages of the same shape."""

STD_EPSILON = 1e-6
"""Keeps the quotient finite for groups whose scores are all equal (their advantages are 0)."""


def grpo(groups: Sequence[Sequence[float]], unbiased: bool = False) -> list[list[float]]:
    """Group-relative advantages: (s − mean) / (std + 1e-6), std with n − 1.

    A group of one has mean 0 and std 1. `unbiased` leaves out the division (Dr. GRPO).
    Sources: GRPO, arXiv 2402.03300, §4.1.2; Dr. GRPO, arXiv 2503.20783, §3.1.
    """
    return [_grpo_group(scores, unbiased) for scores in groups]


def _grpo_group(scores: Sequence[float], unbiased: bool) -> list[float]:
    n = len(scores)
    mean = math.fsum(scores) / n if n > 1 else 0.0
    centred = [score - mean for score in scores]
    if unbiased:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1)) if n > 1 else 1.0
    return [c / (std + STD_EPSILON) for c in centred]


ESTIMATORS: Mapping[str, Estimator] = {"grpo": grpo}


def sample_advantages(
    scores: Sequence[float | None], group: Sequence[int], estimator: Estimator, unbiased: bool
) -> list[float]:
    """Advantages in the order of the samples, [n].

    Args:
        scores: one per sample; None where the reward failed. Such samples take no part in their group's
            statistics and get 0; the caller leaves them out of the loss.
        group: which group each sample belongs to.
    """
    rows: dict[int, list[int]] = {}
    for row, (score, which) in enumerate(zip(scores, group, strict=True)):
        if score is not None:
            rows.setdefault(which, []).append(row)
    advantages = [0.0] * len(scores)
    by_group = [[float(scores[row]) for row in members] for members in rows.values()]  # type: ignore[arg-type]
    for members, values in zip(rows.values(), estimator(by_group, unbiased), strict=True):
        for row, value in zip(members, values, strict=True):
            advantages[row] = value
    return advantages
