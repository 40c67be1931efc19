"""Rules of an evaluation: it reads a file, scores what is there, and uses nothing of a training job."""

from __future__ import annotations

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.data import dataset_problems
from schema.config.rules.reward import reward_problems
from schema.config.sections.dataset import DatasetConfig

_DATASET = "evaluation.dataset"
_IDLE = ("test_size", "max_prompt_length", "overlong_prompts")
_SPLITS = ("test", "validation", "valid", "val", "dev", "train")


def one_job(config: Config) -> list[Problem]:
    """A configuration trains or evaluates, not both."""
    dataset = config.train.train_policy.dataset
    if not dataset.is_named:
        return []
    key = f"{_DATASET}.files" if config.evaluation.dataset.files else f"{_DATASET}.name"
    message = "an evaluation scores answers and trains nothing, and train.train_policy.dataset is named too"
    hint = "leave one of the two out: for scores while training goes on there is [validation]"
    related = ("train.train_policy.dataset",)
    return [Problem(key, message, config.evaluation.dataset.name, hint, related=related)]


def answers_can_be_read(config: Config) -> list[Problem]:
    """The file is there and has the columns."""
    problems, default = (
        dataset_problems(config, _DATASET, config.evaluation.dataset, _SPLITS),
        DatasetConfig(),
    )
    for name in _IDLE:
        value = getattr(config.evaluation.dataset, name)
        if value != getattr(default, name):
            message = "has no effect: all answers of the file are scored"
            problems.append(Problem(f"{_DATASET}.{name}", message, value, "leave it out"))
    return problems


def rewards_are_known(config: Config) -> list[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    section = config.evaluation
    return reward_problems("evaluation.reward_function", section.reward_function, section.reward_weights)


EVALUATION_RULES = (one_job, answers_can_be_read, rewards_are_known)
