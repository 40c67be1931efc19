"""Rules of roles and of shares: how many replicas there are of each, what they need, who gets what part."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, FirstOf, InGrpo, Refusal, Row, Rule, refused, section, value_at
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.validation import ValidationConfig

_POLICY = "train.train_policy"
_ROLLOUTS = "rollout.parallelism.n_init_replicas"
_SHARES_ADD_UP = 1e-6  # shares are written by hand: 0.333 + 0.667 is meant to be 1


def images_are_pinned(config: Config) -> Iterator[Problem]:
    """An image without a tag, or `latest`, is another one with each pull: pods of one job would differ."""
    for name in ("image", "redis_image", "controller_image", "policy_image", "rollout_image"):
        image = getattr(config.kubernetes, name)
        if image and "@" not in image and image.rpartition("/")[2].partition(":")[2] in ("", "latest"):
            plain = image.removesuffix(":latest").removesuffix(":")
            says = "{~} may be another image with each pull, and pods of one job would differ"
            hint = f'write {{!}} = "{plain}:1.0", or the tag or digest that it has'
            yield refused(config, f"kubernetes.{name}", says, hint)


def domains_are_shared(config: Config) -> Iterator[Problem]:
    """Shares of domains have a column that names the domain; they are positive and add up to one."""
    key, column, shares = (f"{_POLICY}.domain_shares", f"{_POLICY}.domain_column_name", config.grpo.domain_shares)
    total = math.fsum(shares.values()) if all(abs(share) <= 1e9 for share in shares.values()) else math.inf
    if shares and not config.grpo.domain_column_name:
        message = f'{_table(shares)} are shares of domains, and {column} = "" names none'
        yield Problem(key, message, shares, f'write {column} = "domain", or leave it out', related=(column,))
    if config.grpo.domain_column_name and not shares:
        hint = "leave it out, or give each domain its share"
        yield refused(config, column, "{} has no effect: {.domain_shares!} is empty", hint, (key,))
    if low := [name for name, share in shares.items() if share <= 0.0]:
        message = f"{', '.join(low)} has no positive share in {_table(shares)}"
        yield Problem(key, message, shares, "give it a share, or filter the data")
    elif shares and abs(total - 1.0) > _SHARES_ADD_UP:
        scaled = {name: round(share / total, 4) for name, share in shares.items()}
        message, hint = (f"{_table(shares)} add up to {total:g}, not to 1", f"in these proportions: {_table(scaled)}")
        yield Problem(key, message, shares, hint)


def _table(shares: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} = {share:g}" for name, share in shares.items()) + "}"


Validation = Row[ValidationConfig]


def _replicas(config: Config) -> int:
    return config.rollout.parallelism.n_init_replicas


def _most_replicas(config: Config) -> str:
    return "autoscale.max_replicas" if config.autoscale.enable else _ROLLOUTS


def _is_named(role: RewardModelConfig) -> bool:
    return bool(role.model_name_or_path or role.custom_class)


def _scales(config: Config) -> bool:
    return config.is_grpo and config.autoscale.enable


ROLE_RULES: tuple[Rule, ...] = (
    Refusal("autoscale.enable", lambda c: c.autoscale.enable and not c.is_grpo,
        "supervised training ({train.train_policy.type=}) has no rollout replicas to scale",
        "write {.enable!} = false"),
    Refusal("autoscale.enable", lambda c: _scales(c) and c.shares_time,
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
    InGrpo(
        Refusal("validation.max_replicas",
            lambda c: c.validation.enable and c.validation.max_replicas > value_at(c, _most_replicas(c)),
            lambda c: f"{{}} is more than {{{_most_replicas(c)}=}}",
            lambda c: f"write {{!}} = {{{_most_replicas(c)}}}"),
    ),
    Refusal("reward_model.enable", lambda c: c.reward_model.enable and not c.is_grpo,
        "supervised training ({train.train_policy.type=}) has no answers to score", "write {.enable!} = false"),
    InGrpo(
        Refusal("reward_model.enable", lambda c: c.reward_model.enable and not _is_named(c.reward_model),
            "true has no model: {.model_name_or_path!} and {.custom_class!} are unset",
            'write {.model_name_or_path!} = "owner/name", or {.enable!} = false',
            (".model_name_or_path", ".custom_class")),
    ),
    InGrpo(domains_are_shared),
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
