"""Advantages of the samples of a batch, from their rewards alone, by the name of the estimator.

Outcome estimators: one reward per sample in, one advantage per sample out, spread over its response tokens by the
loss. They work on plain numbers (float64), since every rank knows the whole table of a step: no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from policy_worker.errors import SettingsError

Estimator = Callable[[Sequence[Sequence[float]], bool], list[list[float]]]
"""(rewards by group, unbiased) -> advantages of the same shape."""

ESTIMATORS: dict[str, Estimator] = {}
"""`train.train_policy.advantage_estimator` to its function."""

STD_EPSILON = 1e-6
"""Keeps the quotient finite for groups whose rewards are all equal (their advantages are 0)."""


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register a function as the advantage estimator of this name."""

    def register(estimate: Estimator) -> Estimator:
        ESTIMATORS[name] = estimate
        return estimate

    return register


def estimator_of(name: str) -> Estimator:
    """Raises `SettingsError` for a name without a registered estimator."""
    if name not in ESTIMATORS:
        raise SettingsError(
            f"train.train_policy.advantage_estimator = {name!r} is not an advantage estimator; known are "
            f"{', '.join(ESTIMATORS)}"
        )
    return ESTIMATORS[name]


@estimator("grpo")
def grpo(groups: Sequence[Sequence[float]], unbiased: bool = False) -> list[list[float]]:
    """Group-relative advantages: (r − mean) / (std + 1e-6), std with n − 1.

    A group of one has mean 0 and std 1. `unbiased` leaves out the division (Dr. GRPO).
    Sources: GRPO, arXiv 2402.03300, §4.1.2; Dr. GRPO, arXiv 2503.20783, §3.1.
    """
    return [_grpo_group(rewards, unbiased) for rewards in groups]


def _grpo_group(rewards: Sequence[float], unbiased: bool) -> list[float]:
    n = len(rewards)
    mean = math.fsum(rewards) / n if n > 1 else 0.0
    centred = [reward - mean for reward in rewards]
    if unbiased:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (n - 1)) if n > 1 else 1.0
    return [c / (std + STD_EPSILON) for c in centred]


def sample_advantages(
    rewards: Sequence[float | None], group: Sequence[int], estimate: Estimator, unbiased: bool
) -> list[float]:
    """Advantages in the order of the samples, [n].

    Args:
        rewards: one per sample; None where scoring failed. Such samples take no part in their group's statistics
            and get 0; the caller leaves them out of the loss.
        group: which group each sample belongs to.
    """
    rows: dict[int, list[int]] = {}
    for row, (reward, which) in enumerate(zip(rewards, group, strict=True)):
        if reward is not None:
            rows.setdefault(which, []).append(row)
    advantages = [0.0] * len(rewards)
    by_group = [[float(rewards[row]) for row in members] for members in rows.values()]  # type: ignore[arg-type]
    for members, values in zip(rows.values(), estimate(by_group, unbiased), strict=True):
        for row, value in zip(members, values, strict=True):
            advantages[row] = value
    return advantages
