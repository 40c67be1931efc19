"""Rules of roles: how many replicas there are of each, and what they need."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import Each, FirstOf, InGrpo, Refusal, Row, Rule, refused, section, value_at
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.validation import ValidationConfig

_POLICY = "train.train_policy"
_ROLLOUTS = "rollout.parallelism.n_init_replicas"


def images_are_pinned(config: Config) -> Iterator[Problem]:
    """An image without a tag, or `latest`, is another one with each pull: pods of one job would differ."""
    for name in ("image", "redis_image", "controller_image", "policy_image", "rollout_image"):
        image = getattr(config.kubernetes, name)
        if image and "@" not in image and image.rpartition("/")[2].partition(":")[2] in ("", "latest"):
            plain = image.removesuffix(":latest").removesuffix(":")
            says = "{~} may be another image with each pull, and pods of one job would differ"
            hint = f'write {{!}} = "{plain}:1.0", or the tag or digest that it has'
            yield refused(config, f"kubernetes.{name}", says, hint)


Validation = Row[ValidationConfig]


def _replicas(config: Config) -> int:
    return config.rollout.parallelism.n_init_replicas


def _most_replicas(config: Config) -> str:
    return "autoscale.max_replicas" if config.autoscale.enable else _ROLLOUTS


def _is_named(role: RewardModelConfig) -> bool:
    return bool(role.model_name_or_path or role.custom_class)


def _scales(config: Config) -> bool:
    return config.is_grpo and config.autoscale.enable


def _is_one(config: Config) -> bool:
    """Whether there is one validation set, which [validation] itself describes."""
    return not config.validation.dataset.part


def _only_validates(config: Config) -> bool:
    return config.validation.enable and config.validation.only


def generated_prompts_are_whole(config: Config) -> Iterator[Problem]:
    """Answers are generated to what stands in front of a conversation's last turn, which is not cut."""
    if config.is_grpo or not config.generates:
        return
    named = config.validation.dataset.is_named
    key = "validation.dataset" if named else "train.train_policy.dataset"
    parts = config.validation.dataset.parts if named else config.train.train_policy.dataset.parts
    for place, part in parts:
        if part.overlong_prompts not in ("drop", "error"):
            says = "{} cuts conversations, and {validation.generate=} answers what stands in front of the last turn"
            yield refused(config, f"{key}{place}.overlong_prompts", says, 'write {!} = "drop" or "error"')


def sets_are_drawn_as_written(config: Config) -> Iterator[Problem]:
    """Warning: keys of a validation set that another one, of its own or of [validation], makes idle."""
    parts = config.validation.dataset.part if config.generates and config.validation.enable else []
    for i, part in enumerate(parts):
        keys, table = config.validation.of_set(part.label), f"validation.dataset.part[{i}]"

        def where(name: str, own: Collection[str] = part.own, table: str = table) -> str:
            return f"{table}.{name}" if name in own else f"validation.{name}"

        greedy = f"{where('temperature')} = 0.0"
        if keys.temperature > 0.0 and keys.top_k == 1:
            message = f"{keys.temperature} has no effect: {where('top_k')} = 1 always takes the likeliest token"
            hint = f"write {table}.top_k = -1, or {table}.temperature = 0.0"
            yield Problem(f"{table}.temperature", message, part.temperature, hint, related=(where("top_k"),))
        elif keys.temperature == 0.0 and keys.n_generation > 1:
            message = f"{keys.n_generation} greedy answers ({greedy}) to a prompt are all the same"
            hint = f"write {table}.temperature = 1.0 and {table}.top_k = -1, or {table}.n_generation = 1"
            yield Problem(f"{table}.n_generation", message, part.n_generation, hint, related=(where("temperature"),))
        for name in ("top_p", "top_k") if keys.temperature == 0.0 else ():
            if name in part.own:
                message, hint = f"has no effect: {greedy} takes the likeliest token", "leave it out"
                yield Problem(f"{table}.{name}", message, part.own[name], hint, related=(where("temperature"),))


def supervised_sets_have_no_answers(config: Config) -> Iterator[Problem]:
    """A validation set of conversations has no rewards, and nothing is drawn."""
    for i, part in enumerate([] if config.generates else config.validation.dataset.part):
        for name, value in part.own.items():
            message = "has no effect here: supervised training generates nothing"
            yield Problem(f"validation.dataset.part[{i}].{name}", message, value, "leave it out")


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
    Refusal("validation.max_replicas",
        lambda c: c.generates and c.validation.enable and c.validation.max_replicas > value_at(c, _most_replicas(c)),
        lambda c: f"{{}} is more than {{{_most_replicas(c)}=}}",
        lambda c: f"write {{!}} = {{{_most_replicas(c)}}}"),
    Refusal("validation.generate", lambda c: c.validation.generate and not c.validation.enable,
        "true generates nothing, and {.enable=}", "write {!} = false, or turn {.enable!} on"),
    Refusal("validation.reward_function",
        lambda c: not c.is_grpo and c.generates and not all(c.validation_rewards.values()),
        "{.generate=} has nothing to score the answers with",
        'write {!} = "boxed_math", or a function of your own'),
    generated_prompts_are_whole,
    supervised_sets_have_no_answers,
    InGrpo(
        FirstOf(
            Refusal("validation.only", lambda c: c.validation.only and not c.validation.enable,
                "true does nothing but validate, and {.enable=}", "write {!} = false, or turn {.enable!} on"),
            Refusal("validation.only", lambda c: _only_validates(c) and not c.validation.before,
                "true validates the initial weights, and {.before=}", "write {.before!} = true, or {!} = false"),
            Refusal("validation.only",
                lambda c: _only_validates(c) and c.policy.parallelism.n_init_replicas > 1,
                "true publishes the model from one process, and {policy.parallelism.n_init_replicas=}",
                "write {policy.parallelism.n_init_replicas!} = 1, or {!} = false"),
        ),
    ),
    Refusal("reward_model.enable", lambda c: c.reward_model.enable and not c.is_grpo,
        "supervised training ({train.train_policy.type=}) has no answers to score", "write {.enable!} = false"),
    InGrpo(
        Refusal("reward_model.enable", lambda c: c.reward_model.enable and not _is_named(c.reward_model),
            "true has no model: {.model_name_or_path!} and {.custom_class!} are unset",
            'write {.model_name_or_path!} = "owner/name", or {.enable!} = false',
            (".model_name_or_path", ".custom_class")),
    ),
)  # fmt: skip
ROLE_WARNINGS: tuple[Rule, ...] = (
    Each(
        section("validation", lambda c: c.validation if c.generates and c.validation.enable and _is_one(c) else None),
        Validation("temperature", lambda keys: keys.temperature > 0.0 and keys.top_k == 1,
            "{} has no effect: {.top_k=} always takes the likeliest token",
            "write {.top_k!} = -1, or {.temperature!} = 0.0"),
        Validation("n_generation", lambda keys: keys.temperature == 0.0 and keys.n_generation > 1,
            "{} greedy answers ({.temperature=}) to a prompt are all the same",
            "write {.temperature!} = 1.0 and {.top_k!} = -1, or {.n_generation!} = 1"),
    ),
    sets_are_drawn_as_written,
)  # fmt: skip
