"""Names of the columns of numbers that micro-batches have of each token, and what is computed before training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policy_worker.model.logits.head import Head
from policy_worker.training.metrics import Metrics

REFERENCE = "reference"
"""Log-probs of the reference model."""
OLD = "old"
"""Log-probs of π_old, where it is not the policy that made the tokens."""
LEFT_OUT = "left_out"
"""1 for tokens that the loss leaves out."""
REWARD_KL = "reward_kl"
"""The KL in the reward, where it is over the whole vocabulary."""
FRESH = "fresh"
"""1 for tokens of the weights that the step begins with."""
VALUE, RETURN = "value", "return"
"""The critic's value of each token before the step, and the return that it should have expected."""


@dataclass(frozen=True)
class Scores:
    """Results of the passes over a step's samples before any is trained on.

    columns: by name and row. values: the critic's, by row; None without one. head: the reference model's, where a KL
    is over the whole vocabulary. metrics: of the passes."""

    columns: dict[str, dict[int, Tensor]]
    values: dict[int, Tensor] | None
    head: Head | None
    metrics: Metrics
