"""Rules of rewards: every function is built in or stands in a file, and what rewards are given is used.

An evaluation scores what a file holds and uses nothing of a training job: its rules stand here, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from schema.config.base import RewardSpec
from schema.config.loading.explain import closest
from schema.config.paths import NotAFileError, address_fault, home_hint, read_regular
from schema.config.problem import Absent, Problem
from schema.config.reward_signature import of_source
from schema.config.root import Config
from schema.config.rules.data import dataset_problems
from schema.config.rules.idle import written
from schema.config.rules.rows import Refusal, Rule
from schema.config.sections.reward import BUILTIN_REWARDS

_POLICY = "train.train_policy"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_CODE_BYTES = 4 * 1024 * 1024  # of a file of reward functions, which is parsed whole

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def rewards_are_known(config: Config) -> Iterator[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    if not config.is_grpo:
        return
    key, weights = f"{_POLICY}.reward_function", config.grpo.reward_weights
    spec = config.grpo.reward_function
    yield from reward_problems(key, spec, weights, config.custom, may_be_0=bool(config.teacher))
    for name in config.grpo.filter_metrics:
        if name not in weights:
            hint = f"write one of {', '.join(weights)}"
            message = f"`{name}` is not among the reward functions"
            yield Problem(f"{_POLICY}.filter_reward_metric", message, name, hint, related=(key,))
    if own := config.validation.reward_weights:
        spec = config.validation.reward_function
        yield from reward_problems("validation.reward_function", spec, own, config.custom)


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


def own_function(key: str, name: str, purpose: str) -> Definition | Problem | None:
    """The definition of a user's function, `path/to/file.py:function`, or what is wrong with it.

    None: the name is bound in another way, as by an import. purpose: what the file is for, as the message names it.
    """
    file, _, function = name.rpartition(":")
    if fault := address_fault(file, "your functions are"):
        return Problem(key, fault[0], name, fault[1])
    try:
        tree = ast.parse(read_regular(Path(file), MAX_CODE_BYTES), filename=file)
    except OSError as error:
        hint = home_hint(file) or "paths are relative to the current directory"
        kind = Absent if isinstance(error, FileNotFoundError) else Problem
        return kind(key, f"{purpose} {file} cannot be read: {error.strerror}", name, hint)
    except NotAFileError as error:
        return Problem(key, f"{purpose} {file} cannot be read: {error}", name, "write it to a file first")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(key, f"{purpose} {file} is not valid Python{line}: {error}", name)
    if function in _bound_names(tree):
        return None
    definitions = {node.name: node for node in tree.body if isinstance(node, Definition)}
    if function in definitions:
        return definitions[function]
    functions = [node.name for node in definitions.values() if not isinstance(node, ast.ClassDef)]
    close = closest(function, functions)
    hint = f"did you mean `{file}:{close}`?" if close else f"its functions: {', '.join(functions) or 'none'}"
    return Problem(key, f"{file} has no function `{function}`", name, hint)


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds without `def`: assigned or imported callables."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


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
_IDLE = ("test_size", "max_prompt_length", "overlong_prompts", "image_column_name")


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
    for name, value in written(config.evaluation.dataset, *_IDLE):
        yield Problem(f"{_DATASET}.{name}", message, value, "leave it out")


def evaluation_rewards_are_known(config: Config) -> Iterator[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    section = config.evaluation
    weights = section.reward_weights
    return reward_problems("evaluation.reward_function", section.reward_function, weights, config.custom)


EVALUATION_RULES = (one_job, answers_can_be_read, evaluation_rewards_are_known, variables_can_be_passed)
