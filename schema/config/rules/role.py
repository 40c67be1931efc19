"""Rules of roles and of shares: how many replicas there are of each, what they need, who gets what part."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"
_ROLLOUTS = "rollout.parallelism.n_init_replicas"
_SHARES_ADD_UP = 1e-6  # shares are written by hand: 0.333 + 0.667 is meant to be 1


def autoscaling_has_room(config: Config) -> Iterator[Problem]:
    """min_replicas <= n_init_replicas <= max_replicas, where the number may change."""
    scale = config.autoscale
    if not scale.enable:
        return
    key = "autoscale.enable"
    if not config.is_grpo:
        message = f'supervised training ({_POLICY}.type = "sft") has no rollout replicas to scale'
        yield Problem(key, message, True, f"write {key} = false", related=(f"{_POLICY}.type",))
        return
    if config.takes_turns:
        message = (
            'trainer and replicas take turns (placement.share = "time"): each waits for the other anyhow'
        )
        yield Problem(key, message, True, f"write {key} = false", related=("placement.share",))
    low, high, first = scale.min_replicas, scale.max_replicas, config.rollout.parallelism.n_init_replicas
    least, most = "autoscale.min_replicas", "autoscale.max_replicas"
    if low > high:
        message = f"{low} is more than {most} = {high}"
        hint = f"write {least} = {min(first, high)}, or a larger {most}"
        yield Problem(least, message, low, hint, related=(most,))
    elif first < low:
        message = f"{low} is more than {_ROLLOUTS} = {first}, the replicas at the start"
        hint = f"write {least} = {first}, or {_ROLLOUTS} = {low}"
        yield Problem(least, message, low, hint, related=(_ROLLOUTS,))
    elif first > high:
        message = f"{high} is less than {_ROLLOUTS} = {first}, the replicas at the start"
        hint = f"write {most} = {first}, or {_ROLLOUTS} = {high}"
        yield Problem(most, message, high, hint, related=(_ROLLOUTS,))


def images_are_pinned(config: Config) -> Iterator[Problem]:
    """An image without a tag, or `latest`, is another one with each pull: pods of one job would differ."""
    for name in ("image", "redis_image", "controller_image", "policy_image", "rollout_image"):
        image, key = getattr(config.kubernetes, name), f"kubernetes.{name}"
        tag = image.rpartition("/")[2].partition(":")[2]
        if image and "@" not in image and tag in ("", "latest"):
            message = f"{image} may be another image with each pull, and pods of one job would differ"
            plain = image.removesuffix(":latest").removesuffix(":")
            yield Problem(
                key, message, image, f'write {key} = "{plain}:1.0", or the tag or digest that it has'
            )


def validation_leaves_replicas(config: Config) -> Iterator[Problem]:
    """No more rollout replicas can validate than there can be."""
    validation, key = config.validation, "validation.max_replicas"
    if not config.is_grpo or not validation.enable:
        return
    most_key, most = _ROLLOUTS, config.rollout.parallelism.n_init_replicas
    if config.autoscale.enable:
        most_key, most = "autoscale.max_replicas", config.autoscale.max_replicas
    if validation.max_replicas <= most:
        return
    message = f"{validation.max_replicas} is more than {most_key} = {most}"
    hint = f"write {key} = {most}"
    yield Problem(key, message, validation.max_replicas, hint, related=(most_key,))


def reward_model_is_named(config: Config) -> Iterator[Problem]:
    """A reward model is a model or a class of the user's."""
    role, key = config.reward_model, "reward_model.enable"
    if not role.enable:
        return
    if not config.is_grpo:
        message = f'supervised training ({_POLICY}.type = "sft") has no answers to score'
        yield Problem(key, message, True, f"write {key} = false", related=(f"{_POLICY}.type",))
    elif not role.model_name_or_path and not role.custom_class:
        model, custom = "reward_model.model_name_or_path", "reward_model.custom_class"
        message = f"true has no model: {model} and {custom} are unset"
        hint = f'write {model} = "owner/name", or {key} = false'
        yield Problem(key, message, True, hint, related=(model, custom))


def domains_are_shared(config: Config) -> Iterator[Problem]:
    """Shares of domains have a column that names the domain; they are positive and add up to one."""
    if not config.is_grpo:
        return
    policy = config.grpo
    key, column = f"{_POLICY}.domain_shares", f"{_POLICY}.domain_column_name"
    shares = policy.domain_shares
    if shares and not policy.domain_column_name:
        message = f'{_table(shares)} are shares of domains, and {column} = "" names none'
        hint = f'write {column} = "domain", or leave it out'
        yield Problem(key, message, shares, hint, related=(column,))
    if policy.domain_column_name and not shares:
        message = f'"{policy.domain_column_name}" has no effect: {key} is empty'
        hint = "leave it out, or give each domain its share"
        yield Problem(column, message, policy.domain_column_name, hint, related=(key,))
    low = [name for name, share in shares.items() if share <= 0.0]
    total = math.fsum(shares.values()) if all(abs(share) <= 1e9 for share in shares.values()) else math.inf
    if low:
        message = f"{', '.join(low)} has no positive share in {_table(shares)}"
        yield Problem(key, message, shares, "give it a share, or filter the data")
    elif shares and abs(total - 1.0) > _SHARES_ADD_UP:
        message = f"{_table(shares)} add up to {total:g}, not to 1"
        scaled = {name: round(share / total, 4) for name, share in shares.items()}
        hint = f"in these proportions: {_table(scaled)}"
        yield Problem(key, message, shares, hint)


def validation_samples_differ(config: Config) -> Iterator[Problem]:
    """Warning: several greedy answers to one prompt are the same answer, and one likeliest token is greedy."""
    validation = config.validation
    if not config.is_grpo or not validation.enable:
        return
    temperature, top_k, several = "validation.temperature", "validation.top_k", "validation.n_generation"
    if validation.temperature > 0.0 and validation.top_k == 1:
        message = f"{validation.temperature} has no effect: {top_k} = 1 always takes the likeliest token"
        hint = f"write {top_k} = -1, or {temperature} = 0.0"
        yield Problem(temperature, message, validation.temperature, hint, related=(top_k,))
    elif validation.temperature == 0.0 and validation.n_generation > 1:
        message = (
            f"{validation.n_generation} greedy answers ({temperature} = 0.0) to a prompt are all the same"
        )
        hint = f"write {temperature} = 1.0 and {top_k} = -1, or {several} = 1"
        yield Problem(several, message, validation.n_generation, hint, related=(temperature,))


def _table(shares: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} = {share:g}" for name, share in shares.items()) + "}"


ROLE_RULES = (
    autoscaling_has_room,
    images_are_pinned,
    validation_leaves_replicas,
    reward_model_is_named,
    domains_are_shared,
)
ROLE_WARNINGS = (validation_samples_differ,)
