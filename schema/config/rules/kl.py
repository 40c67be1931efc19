"""Rules of the KL terms and of the reference model that they compare with."""

from __future__ import annotations

from typing import Any

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.loss import has_kl

_POLICY = "train.train_policy"
_BETA = f"{_POLICY}.kl_beta"
_REWARD = f"{_POLICY}.kl_in_reward"
_EITHER = f"{_BETA} = 0.0 and {_REWARD}.beta = 0.0"


def loss_term_is_on(config: Config) -> list[Problem]:
    """How the KL in the loss is estimated matters when there is one."""
    if not config.is_grpo or config.grpo.kl_beta > 0.0:
        return []
    policy, problems = config.grpo, []
    idle: list[tuple[str, Any, str]] = []
    if policy.kl_type != "k3":
        idle.append(("kl_type", policy.kl_type, f'"{policy.kl_type}" estimates a term'))
    if policy.unbiased_kl_estimate:
        idle.append(("unbiased_kl_estimate", True, "weighs a term"))
    for name, value, does in idle:
        message, hint = f"{does} that {_BETA} = 0.0 leaves out", f"write {_BETA} = 0.001, or leave it out"
        problems.append(Problem(f"{_POLICY}.{name}", message, value, hint, related=(_BETA,)))
    return problems


def reference_is_used(config: Config) -> list[Problem]:
    """The reference model exists when a KL term does."""
    if has_kl(config):
        return []
    hint, problems = f"write {_BETA} = 0.001, or leave it out", []
    related: tuple[str, ...] = (_BETA, f"{_REWARD}.beta")
    without = _EITHER if config.is_grpo else f'{_POLICY}.type = "sft"'
    if not config.is_grpo:
        hint, related = "leave it out", (f"{_POLICY}.type",)
    elif config.grpo.reference_reset_interval:
        interval = config.grpo.reference_reset_interval
        message = f"{interval} is the time between resets of a model that this job does not have ({without})"
        problems.append(
            Problem(f"{_POLICY}.reference_reset_interval", message, interval, hint, related=related)
        )
    reference = config.reference
    for name, info in type(reference).model_fields.items():
        value = getattr(reference, name)
        if value != info.get_default(call_default_factory=True):
            message = f"there is no reference model: {without}"
            problems.append(Problem(f"reference.{name}", message, value, hint, related=related))
    return problems


def resets_agree(config: Config) -> list[Problem]:
    """What happens to the optimizer at a reset needs resets."""
    if (
        not config.is_grpo
        or config.grpo.reset_optimizer_with_reference
        or config.grpo.reference_reset_interval
    ):
        return []
    key, other = f"{_POLICY}.reset_optimizer_with_reference", f"{_POLICY}.reference_reset_interval"
    message = f"false has no effect: {other} is unset, so the reference model is never reset"
    hint = f"leave it out, or write {other} = 100" if has_kl(config) else "leave it out"
    return [Problem(key, message, False, hint, related=(other,))]


def reward_term_is_complete(config: Config) -> list[Problem]:
    """Options of the KL in the reward need a coefficient; those of its controller need it to be adaptive."""
    if not config.is_grpo:
        return []
    term, problems = config.grpo.kl_in_reward, []
    if term.beta == 0.0:
        for name, neutral in (("type", "k1"), ("controller", "fixed")):
            value = getattr(term, name)
            if value != neutral:
                message = f'"{value}" has no effect: {_REWARD}.beta = 0.0'
                hint = f"write {_REWARD}.beta = 0.001, or leave it out"
                key, related = f"{_REWARD}.{name}", (f"{_REWARD}.beta",)
                problems.append(Problem(key, message, value, hint, related=related))
    if term.controller == "fixed":
        for name in ("target", "horizon"):
            value = getattr(term, name)
            if value != type(term).model_fields[name].default:
                message = f'{value} has no effect: {_REWARD}.controller = "fixed" keeps the coefficient'
                hint = f'write {_REWARD}.controller = "adaptive", or leave it out'
                key, related = f"{_REWARD}.{name}", (f"{_REWARD}.controller",)
                problems.append(Problem(key, message, value, hint, related=related))
    return problems


KL_RULES = (loss_term_is_on, reference_is_used, resets_agree, reward_term_is_complete)
