"""ROLL's algorithm keys: which of our estimators, KL terms and losses they come to, and what they cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from convert.engine.model import Outcome
from tests.convert.files import ABSENT, roll_with, value_of

_POLICY = "train.train_policy"


def _policy(changes: dict[str, Any]) -> dict[str, Any]:
    policy: dict[str, Any] = roll_with(changes).config["train"]["train_policy"]
    return policy


@pytest.mark.parametrize(
    ("changes", "estimator", "unbiased"),
    [
        ({"adv_estimator": "grpo"}, "grpo", None),
        ({"adv_estimator": "grpo", "reward_norm": "group"}, "grpo", None),
        ({"adv_estimator": "grpo", "norm_mean_type": "batch", "gamma": 1.0}, "grpo", None),
        ({"adv_estimator": "reinforce", "reward_norm": "group"}, "grpo", None),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "group"}, "grpo", None),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group"}, "grpo", True),
        (
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "whiten_advantages": True},
            "reinforce_plus_plus_baseline",
            None,
        ),
        ({"adv_estimator": "reinforce", "whiten_advantages": True}, "reinforce_plus_plus", None),
        ({"adv_estimator": "gae", "whiten_advantages": True}, "gae", None),
    ],
)
def test_estimators(changes: dict[str, Any], estimator: str, unbiased: bool | None) -> None:
    found = roll_with(changes)
    policy = found.config["train"]["train_policy"]
    assert policy["advantage_estimator"] == estimator
    assert policy.get("unbiased_advantage") is unbiased
    assert value_of(found, "critic.enable") is (True if estimator == "gae" else None)
    assert not found.of(Outcome.NONE)
    assert not found.warnings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"whiten_advantages": False}),
        ({"norm_mean_type": "batch", "whiten_advantages": True}, {"reward_shaping": {"center": "batch"}}),
        (
            {"reward_norm": "batch", "reward_clip": 5},
            {"reward_shaping": {"center": "batch", "scale": "batch", "clip": 5}, "whiten_advantages": False},
        ),
        (
            {"reward_norm": "group", "reward_shift": True, "reward_clip": 2, "whiten_advantages": True},
            {"reward_shaping": {"center": "group", "clip": 2}},
        ),
        (
            {"reward_norm": "batch", "reward_scale": True, "advantage_clip": 2.0},
            {"reward_shaping": {"scale": "batch"}, "whiten_advantages": False, "advantage_clip": 2.0},
        ),
        (
            {"adv_estimator": "grpo", "whiten_advantages": True, "gamma": 0.9},
            {"reward_shaping": {"center": "group", "scale": "group"}, "gamma": 0.9},
        ),
    ],
)
def test_what_no_estimator_alone_does_is_shaping_and_whitening(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = roll_with({"adv_estimator": "reinforce", **changes})
    policy = found.config["train"]["train_policy"]
    assert not found.unsupported
    keys = ("reward_shaping", "whiten_advantages", "advantage_clip", "gamma")
    assert policy["advantage_estimator"] == "reinforce_plus_plus"
    assert {key: policy[key] for key in keys if key in policy} == expected


def test_kl_in_the_reward_needs_its_switch() -> None:
    keys = {"init_kl_coef": 0.05, "kl_penalty": "mse", "target_kl": 0.2, "kl_horizon": 500}
    off = roll_with(keys)
    assert "kl_in_reward" not in off.config["train"]["train_policy"]
    assert all(off.entry(key).outcome is Outcome.IMPLICIT for key in keys)
    on = _policy({**keys, "add_token_level_kl": True})["kl_in_reward"]
    assert on == {"beta": 0.05, "type": "k2", "controller": "adaptive", "target": 0.2, "horizon": 500}
    assert _policy({"add_token_level_kl": True})["kl_in_reward"]["beta"] == 0.2


def test_aggregation_by_the_longest_answer() -> None:
    found = roll_with({"loss_agg_mode": "seq-mean-token-sum-norm", "response_length": 777})
    assert any("also divided by the number of samples" in text for text in found.warnings)
    policy = found.config["train"]["train_policy"]
    assert (policy["loss_type"], policy["unbiased_loss_max_tokens"]) == ("seq-mean-token-mean", 777)


def test_correction_of_the_mismatch() -> None:
    keys = {
        "train_infer_correction.is_weight.enabled": True,
        "train_infer_correction.is_weight.weight_type": "sequence",
        "train_infer_correction.filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.9}],
    }
    assert _policy(keys)["rollout_correction"] == {
        "weights": "sequence",
        "cap": 1.2,
        "reject": "token",
        "reject_below": 0.9,
        "reject_above": 1.2,
    }
    segments = roll_with({**keys, "train_infer_correction.is_weight.weight_type": "segment"})
    assert segments.unsupported == {"train_infer_correction.is_weight.weight_type": "segment"}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ({"math_rule": "MathRuleRewardWorker"}, "boxed_math"),
        ({"choices": "CrossThinkQARuleRewardWorker"}, "single_choice"),
        ({"a": "MathRuleRewardWorker", "b": "MathRuleRewardWorker"}, "boxed_math"),
        ({"a": "MathRuleRewardWorker", "b": "CrossThinkQARuleRewardWorker"}, "by_source"),
        ({"judge": "LLMJudgeRewardWorker"}, "path/to/reward.py:function"),
    ],
)
def test_rewards(workers: dict[str, str], expected: str) -> None:
    rewards = {f"rewards.{domain}.worker_cls": f"roll.rewards.{name}" for domain, name in workers.items()}
    found = roll_with({"rewards.math_rule.worker_cls": ABSENT, **rewards})
    assert value_of(found, f"{_POLICY}.reward_function") == expected


def test_a_reward_without_function_is_never_a_silent_default() -> None:
    found = roll_with({"rewards.math_rule.worker_cls": "mine.Worker"})
    assert any("must be written by hand" in text for text in found.warnings)


def test_dynamic_sampling() -> None:
    prefix = "rewards.math_rule.query_filter_config"
    found = roll_with({f"{prefix}.type": "std_filter", f"{prefix}.filter_args.std_threshold": 0})
    assert value_of(found, f"{_POLICY}.filter_reward_metric") == ["boxed_math"]
    mean = roll_with({f"{prefix}.type": "mean_filter", f"{prefix}.filter_args.threshold_up": 0.9})
    assert mean.unsupported == {f"{prefix}.type": "mean_filter"}


@pytest.mark.parametrize(
    ("keys", "masks"),
    [
        ({"max_len_mask": True}, {"truncated": True}),
        ({"max_len_mask": False}, None),
        ({"difficulty_mask": True}, {"mean_score_above": 0.0, "mean_score_below": 1.0}),
        (
            {"difficulty_mask": True, "difficulty_low_threshold": 0.1, "difficulty_high_threshold": 0.95},
            {"mean_score_above": 0.1, "mean_score_below": 0.95},
        ),
        ({"difficulty_low_threshold": 0.1}, None),
        ({"difficulty_mask": True, "num_return_sequences_in_group": 1}, None),
        ({"error_max_len_clip": True, "error_max_len_threshold": 512}, {"failed_from_tokens": 512}),
        ({"error_max_len_clip": True}, None),
        ({"error_max_len_clip": True, "error_max_len_threshold": 1025}, None),
        ({"error_max_len_threshold": 512}, None),
    ],
    ids=str,
)
def test_masks_of_samples(keys: dict[str, Any], masks: dict[str, Any] | None) -> None:
    found = roll_with(keys)
    assert value_of(found, f"{_POLICY}.sample_masks") == masks
    assert not found.unsupported
    assert not found.of(Outcome.UNKNOWN)
    warned = any("error_max_len_clip" in warning for warning in found.warnings)
    assert warned == ("failed_from_tokens" in (masks or {}))


def test_the_experts_of_the_engine_are_replayed() -> None:
    key = "actor_train.router_replay.mode"
    others = {f"{role}.router_replay.mode": "R3" for role in ("actor_infer", "reference")}
    found = roll_with({key: "R3"} | others)
    assert value_of(found, f"{_POLICY}.routing_replay") == "ids"
    assert not found.unsupported
    for mode, words in (("R2", "what the engine chose is replayed here"), ("R4", "expected one of")):
        found = roll_with({key: mode})
        assert found.unsupported == {key: mode}
        assert words in next(entry.note for entry in found.entries if entry.source == key)
    assert not roll_with({key: "disable"}).unsupported
    critic = {"adv_estimator": "gae", "critic.router_replay.mode": "R3"}
    assert roll_with(critic).unsupported == {"critic.router_replay.mode": "R3"}
