"""Rules of advantages: an estimator has the critic or the group that it needs, and only its own options."""

from __future__ import annotations

from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"
_ESTIMATOR = f"{_POLICY}.advantage_estimator"
_GROUP = "rollout.n_generation"
_GROUPED = {  # estimator -> what one sample alone gets from it (NUMERICS, Advantages)
    "grpo": "its raw score",
    "rloo": "its raw score",
    "reinforce_plus_plus_baseline": "its raw score",
    "opo": "always zero",
    "gpg": "always zero",
    "pass_at_k": "a second best that does not exist",
}
_SCALED = ("grpo", "pass_at_k")  # those that divide by the group's standard deviation


def critic_agrees(config: Config) -> list[Problem]:
    """`gae` needs values, and values serve `gae` alone."""
    key = "critic.enable"
    if not config.is_grpo:
        if not config.critic.enable:
            return []
        message = f'supervised training ({_POLICY}.type = "sft") has no critic'
        return [Problem(key, message, True, f"write {key} = false", related=(f"{_POLICY}.type",))]
    estimator = config.grpo.advantage_estimator
    if estimator == "gae" and not config.critic.enable:
        message = f'"gae" needs the values of a critic, and {key} = false'
        hint = f'write {key} = true, or {_ESTIMATOR} = "grpo"'
        return [Problem(_ESTIMATOR, message, estimator, hint, related=(key,))]
    if config.critic.enable and estimator != "gae" and ":" not in estimator:
        message = f'true trains values that {_ESTIMATOR} = "{estimator}" does not read'
        hint = f'write {_ESTIMATOR} = "gae", or {key} = false'
        return [Problem(key, message, True, hint, related=(_ESTIMATOR,))]
    return []


def critic_warms_up_in_time(config: Config) -> list[Problem]:
    """The policy learns after the critic's warm-up, so the run is longer than it."""
    steps, total = config.critic.warmup_steps, config.train.max_num_steps
    if not config.is_grpo or not config.critic.enable or total is None or steps < total:
        return []
    key, other = "critic.warmup_steps", "train.max_num_steps"
    message = f"{steps} steps before the policy learns are all of {other} = {total}"
    return [
        Problem(key, message, steps, f"write {key} = {total // 10}, or a larger {other}", related=(other,))
    ]


def groups_are_large_enough(config: Config) -> list[Problem]:
    """Estimators and filters that compare the samples of a prompt need more than one."""
    if not config.is_grpo or config.rollout.n_generation > 1:
        return []
    policy, problems = config.grpo, []
    estimator = policy.advantage_estimator
    if estimator in _GROUPED:
        message = (
            f'{_ESTIMATOR} = "{estimator}" compares the samples of a prompt, and with {_GROUP} = 1 the advantage '
            f"would be {_GROUPED[estimator]}"
        )
        hint = f'write {_GROUP} = 8, or {_ESTIMATOR} = "reinforce_plus_plus"'
        problems.append(Problem(_GROUP, message, 1, hint, related=(_ESTIMATOR,)))
    idle = {
        "filter_reward_metric": policy.filter_metrics,
        "min_filter_prefix_tokens": policy.min_filter_prefix_tokens,
    }
    for name, value in idle.items():
        if value:
            key = f"{_POLICY}.{name}"
            message = (
                f"{value} compares the samples of a prompt, and {_GROUP} = 1: every group would be left out"
            )
            if name != "filter_reward_metric":
                message = f"{value} compares the samples of a prompt, and {_GROUP} = 1"
            hint = f"leave it out, or write {_GROUP} = 8"
            problems.append(Problem(key, message, value, hint, related=(_GROUP,)))
    return problems


def options_belong_to_their_estimator(config: Config) -> list[Problem]:
    """Discounts and divisions that an estimator does not have."""
    if not config.is_grpo:
        return []
    policy, problems = config.grpo, []
    estimator = policy.advantage_estimator
    if ":" in estimator:  # the user's own may read any of them
        return []
    owners = {
        "gamma": (1.0, ("gae", "reinforce_plus_plus")),
        "gae_lambda": (1.0, ("gae",)),
        "unbiased_advantage": (False, _SCALED),
    }
    for name, (neutral, estimators) in owners.items():
        value = getattr(policy, name)
        if value != neutral and estimator not in estimators:
            shown = "true" if value is True else value
            message = f'{shown} has no effect: {_ESTIMATOR} = "{estimator}" does not read it'
            hint = f"leave it out; it belongs to {' and '.join(estimators)}"
            problems.append(Problem(f"{_POLICY}.{name}", message, value, hint, related=(_ESTIMATOR,)))
    return problems


ESTIMATOR_RULES = (
    critic_agrees,
    critic_warms_up_in_time,
    groups_are_large_enough,
    options_belong_to_their_estimator,
)
