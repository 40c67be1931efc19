"""From the rewards of a sample to its score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from schema.config import OverlongRewardConfig

OVERLONG = "overlong"


def overlong_penalty(response_tokens: int, max_tokens: int, config: OverlongRewardConfig) -> float:
    """Soft punishment of long answers, ≤ 0: DAPO (arXiv 2503.14476), eq. 13, lengths in tokens.

    min(−(length − (max_tokens − buffer)) / buffer · penalty_factor, 0)
    """
    over = response_tokens - (max_tokens - config.buffer_length)
    return min(-over / config.buffer_length * config.penalty_factor, 0.0)


def score_of(
    rewards: Mapping[str, float], weights: Mapping[str, float], error: str | None
) -> tuple[float | None, str | None]:
    """The score of a sample, or the error that takes its place: of its rewards, or of a sum that is not a number."""
    if error is not None:
        return None, error
    score = total(rewards, weights)
    if not math.isfinite(score):
        return None, f"RewardNotANumber: the weighted sum of the rewards is {score}"
    return score, None


def parts_of(parts: Mapping[str, Sequence[tuple[int, float]]], weights: Mapping[str, float]) -> dict[int, float]:
    """The parts of a score by the character of the answer at which they were earned."""
    by_character: dict[int, float] = {}
    for name, located in parts.items():
        for place, value in located:
            by_character[place] = by_character.get(place, 0.0) + weights[name] * value
    return by_character


def total(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Σ weight · reward over the functions, plus the overlong penalty where there is one (it has weight 1)."""
    return sum(weights[name] * rewards[name] for name in weights) + rewards.get(OVERLONG, 0.0)
