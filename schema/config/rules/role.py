"""Rules of roles and of shares: how many replicas there are of each, what they need, who gets what part."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, FirstOf, InGrpo, Refusal, Row, Rule, section
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.validation import ValidationConfig

_POLICY = "train.train_policy"
_ROLLOUTS = "rollout.parallelism.n_init_replicas"
_SHARES_ADD_UP = 1e-6  # shares are written by hand: 0.333 + 0.667 is meant to be 1


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


def _table(shares: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} = {share:g}" for name, share in shares.items()) + "}"


Validation = Row[ValidationConfig]


def _replicas(config: Config) -> int:
    return config.rollout.parallelism.n_init_replicas


def _is_named(role: RewardModelConfig) -> bool:
    return bool(role.model_name_or_path or role.custom_class)


def _scales(config: Config) -> bool:
    return config.is_grpo and config.autoscale.enable


ROLE_RULES: tuple[Rule, ...] = (
    Refusal("autoscale.enable", lambda c: c.autoscale.enable and not c.is_grpo,
        "supervised training ({train.train_policy.type=}) has no rollout replicas to scale",
        "write {.enable!} = false"),
    Refusal("autoscale.enable", lambda c: _scales(c) and c.takes_turns,
        "trainer and replicas take turns ({placement.share=}): each waits for the other anyhow",
        "write {.enable!} = false"),
    FirstOf(
        Refusal("autoscale.min_replicas",
            lambda c: _scales(c) and c.autoscale.min_replicas > c.autoscale.max_replicas,
            "{} is more than {.max_replicas=}",
            lambda c: f"write {{.min_replicas!}} = {min(_replicas(c), c.autoscale.max_replicas)}, or a larger "
            "{.max_replicas!}"),
        Refusal("autoscale.min_replicas", lambda c: _scales(c) and _replicas(c) < c.autoscale.min_replicas,
            "{} is more than {rollout.parallelism.n_init_replicas=}, the replicas at the start",
            "write {.min_replicas!} = {rollout.parallelism.n_init_replicas}, or "
            "{rollout.parallelism.n_init_replicas!} = {}"),
        Refusal("autoscale.max_replicas", lambda c: _scales(c) and _replicas(c) > c.autoscale.max_replicas,
            "{} is less than {rollout.parallelism.n_init_replicas=}, the replicas at the start",
            "write {.max_replicas!} = {rollout.parallelism.n_init_replicas}, or "
            "{rollout.parallelism.n_init_replicas!} = {}"),
    ),
    images_are_pinned,
    validation_leaves_replicas,
    Refusal("reward_model.enable", lambda c: c.reward_model.enable and not c.is_grpo,
        "supervised training ({train.train_policy.type=}) has no answers to score", "write {.enable!} = false"),
    InGrpo(
        Refusal("reward_model.enable", lambda c: c.reward_model.enable and not _is_named(c.reward_model),
            "true has no model: {.model_name_or_path!} and {.custom_class!} are unset",
            'write {.model_name_or_path!} = "owner/name", or {.enable!} = false',
            (".model_name_or_path", ".custom_class")),
    ),
    domains_are_shared,
)  # fmt: skip
ROLE_WARNINGS: tuple[Rule, ...] = (
    Each(
        section("validation", lambda c: c.validation if c.is_grpo and c.validation.enable else None),
        Validation("temperature", lambda keys: keys.temperature > 0.0 and keys.top_k == 1,
            "{} has no effect: {.top_k=} always takes the likeliest token",
            "write {.top_k!} = -1, or {.temperature!} = 0.0"),
        Validation("n_generation", lambda keys: keys.temperature == 0.0 and keys.n_generation > 1,
            "{} greedy answers ({.temperature=}) to a prompt are all the same",
            "write {.temperature!} = 1.0 and {.top_k!} = -1, or {.n_generation!} = 1"),
    ),
)  # fmt: skip
