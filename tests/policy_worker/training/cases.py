"""Algorithms at random: every estimator with every loss, KL, correction and mask that go together."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

from policy_worker.algorithms.estimators import ESTIMATORS
from policy_worker.algorithms.losses import POLICY_LOSSES, LossType

KL_TYPES = ("k1", "abs", "k2", "k3", "full")
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.5},
    {"use_decoupled_loss": True, "rollout_correction": {"reject": "token", "reject_below": 0.8, "reject_above": 1.3}},
    *({"rollout_correction": {"weights": kind, "cap": 1.2}} for kind in ("token", "sequence")),
    *({"rollout_correction": {"reject": kind, "reject_above": 1.1}} for kind in ("token", "sequence", "geometric")),
    {
        "rollout_correction": {
            "weights": "token",
            "reject": "geometric",
            "reject_below": 0.95,
            "off_policy_mask": 0.02,
        }
    },
    {"rollout_correction": {"reject": "sequence", "reject_above": 1e-9}},
)
"""The last one rejects everything."""


def algorithm(random: Random) -> dict[str, Any]:
    """Keys of `[train.train_policy]`."""
    found: dict[str, Any] = {
        "advantage_estimator": random.choice([name for name in ESTIMATORS if name != "remax"]),
        "variant": random.choice(list(POLICY_LOSSES)),
        "loss_type": random.choice(get_args(LossType)),
        "gamma": random.choice([1.0, 0.9]),
        "gae_lambda": random.choice([1.0, 0.8]),
        "whiten_advantages": random.choice([None, True, False]),
        "entropy_coeff": random.choice([0.0, 0.02]),
        "positive_nll_coef": random.choice([None, 0.1]),
        "min_filter_prefix_tokens": random.choice([None, None, 2]),
        **random.choice(CORRECTIONS),
    }
    if random.random() < 0.6:
        found |= {"kl_beta": 0.1, "kl_type": random.choice(KL_TYPES), "unbiased_kl_estimate": random.random() < 0.3}
    if random.random() < 0.3:
        found["kl_in_reward"] = {"beta": 0.1, "type": random.choice(KL_TYPES)}
    if random.random() < 0.3:
        found["sample_masks"] = {"truncated": True}
    return found


def cut(random: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of `[train.train_policy]` and of `[train]` that say how a step is computed, and change no number."""
    size = random.choice(
        [{"mini_batch": 1}, {"mini_batch": 3}, {"mini_batch": 12}, {"max_token_len_per_mini_batch": 30}]
    )
    return size, {"sequence_packing": random.random() < 0.5, "metrics_of_all_samples": random.random() < 0.5}
