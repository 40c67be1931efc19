"""Rules of rewards: every function is built in or stands in a file, and what rewards are given is used.

An evaluation scores what a file holds and uses nothing of a training job: its rules stand here, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping

from schema.config.base import RewardSpec
from schema.config.loading.explain import closest
from schema.config.problem import Problem
from schema.config.reward_signature import of_source
from schema.config.root import Config
from schema.config.rules.data import dataset_problems
from schema.config.rules.idle import written
from schema.config.rules.mixture import part_problems
from schema.config.rules.own_code import own_function
from schema.config.rules.rows import Refusal, Rule
from schema.config.sections.reward import BUILTIN_REWARDS

_POLICY = "train.train_policy"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def rewards_are_known(config: Config) -> Iterator[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    if config.is_grpo:
        yield from _training_rewards(config)
    if not config.generates:
        return
    if own := config.validation.reward_weights:
        spec = config.validation.reward_function
        yield from reward_problems("validation.reward_function", spec, own, config.custom)
    for i, part in enumerate(config.validation.dataset.part):
        if own := config.validation.of_set(part.label).reward_weights if part.reward_function else {}:
            key = f"validation.dataset.part[{i}].reward_function"
            yield from reward_problems(key, part.reward_function, own, config.custom)


def _training_rewards(config: Config) -> Iterator[Problem]:
    key, weights = f"{_POLICY}.reward_function", config.grpo.reward_weights
    spec = config.grpo.reward_function
    yield from reward_problems(key, spec, weights, config.custom, may_be_0=bool(config.teacher))
    for name in config.grpo.filter_metrics:
        if name not in weights:
            hint = f"write one of {', '.join(weights)}"
            message = f"`{name}` is not among the reward functions"
            yield Problem(f"{_POLICY}.filter_reward_metric", message, name, hint, related=(key,))


def reward_problems(
    key: str, spec: RewardSpec, weights: Mapping[str, float], custom: Collection[str], *, may_be_0: bool = False
) -> Iterator[Problem]:
    """Report the faults of the reward functions that a key names. custom: keys of `[custom]`.

    may_be_0: all weights may be, since something else says what is better.
    """
    if not weights:
        hint = f'write {key} = "boxed_math", or another of {", ".join(BUILTIN_REWARDS)}'
        yield Problem(key, "no reward function is named", spec, hint)
        return
    yield from filter(None, (_reward_problem(key, name, custom) for name in weights))
    if not any(weights.values()) and not may_be_0:
        message, hint = "all weights are 0: no answer is better than another", "give one of them a weight"
        yield Problem(key, message, dict(weights), hint)


def _reward_problem(key: str, name: str, custom: Collection[str]) -> Problem | None:
    if name in BUILTIN_REWARDS:
        return None
    file, colon, function = name.rpartition(":")
    if not colon:
        close = closest(name, BUILTIN_REWARDS)
        hint = f'built in: {", ".join(BUILTIN_REWARDS)}; your own: "path/to/file.py:function"'
        return Problem(key, f"unknown reward function `{name}`", name, f"did you mean `{close}`?" if close else hint)
    definition_or_problem = own_function(key, name, "reward file")
    if isinstance(definition_or_problem, ast.AST):
        fault = of_source(definition_or_problem, custom)
        return fault and Problem(key, f"`{function}` of {file} {fault.message}", name, fault.hint)
    return definition_or_problem


def variables_can_be_passed(config: Config) -> Iterator[Problem]:
    """`reward.environment` has names, and none of ours: the secrets of a job never reach a reward."""
    for index, name in enumerate(config.reward.environment):
        key = f"reward.environment[{index}]"
        if not _VARIABLE.fullmatch(name):
            hint = 'write the name alone, such as "OPENAI_API_KEY": the value stays in the environment'
            yield Problem(key, "is not the name of a variable", name.partition("=")[0], hint)
        elif name.startswith("COSMOS_"):
            message = f"{name} belongs to the job: its secrets and addresses are kept from rewards"
            yield Problem(key, message, name, "give the reward a variable of another name")


REWARD_RULES: tuple[Rule, ...] = (
    rewards_are_known,
    Refusal(("reward.prompt_forms",), lambda c: not c.is_grpo, "supervised training has no rewards",
        related=("train.train_policy.type",)),
    variables_can_be_passed,
)  # fmt: skip


# ---- an evaluation ----------------------------------------------------------------------------------------

_DATASET = "evaluation.dataset"
_IDLE = ("test_size", "max_samples", "max_prompt_length", "overlong_prompts", "image_column_name")


def one_job(config: Config) -> Iterator[Problem]:
    """A configuration trains or evaluates, not both."""
    dataset = config.train.train_policy.dataset
    if not dataset.is_named:
        return
    key = f"{_DATASET}.files" if config.evaluation.dataset.files else f"{_DATASET}.name"
    message = "an evaluation scores answers and trains nothing, and train.train_policy.dataset is named too"
    hint = "leave one of the two out: for scores while training goes on there is [validation]"
    related = ("train.train_policy.dataset",)
    yield Problem(key, message, config.evaluation.dataset.name, hint, related=related)


def answers_can_be_read(config: Config) -> Iterator[Problem]:
    """The file is there and has the columns."""
    yield from dataset_problems(config, _DATASET, config.evaluation.dataset, "validation")
    message = "has no effect: all answers of the file are scored"
    for place, part in config.evaluation.dataset.parts:
        for name, value in written(part, *_IDLE):
            yield Problem(f"{_DATASET}{place}.{name}", message, value, "leave it out")
    yield from part_problems(_DATASET, config.evaluation.dataset, message.removeprefix("has no effect: "))


def evaluation_rewards_are_known(config: Config) -> Iterator[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    section = config.evaluation
    weights = section.reward_weights
    return reward_problems("evaluation.reward_function", section.reward_function, weights, config.custom)


EVALUATION_RULES = (one_job, answers_can_be_read, evaluation_rewards_are_known, variables_can_be_passed)
