"""Rules of what the user brings: datasets and their columns, models, reward functions, places to write."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from schema.config.columns import UnreadableDataError, columns_of
from schema.config.explain import closest
from schema.config.paths import DATA_SUFFIXES, exists, home_hint, is_file, local_path
from schema.config.problem import Problem
from schema.config.reward import BUILTIN_REWARDS
from schema.config.root import Config
from schema.config.train_policy import DatasetConfig

_POLICY = "train.train_policy"
_TRAIN_SPLITS = ("train",)
_VALIDATION_SPLITS = ("validation", "valid", "val", "dev", "test")
_SYNTHETIC = "synthetic:addition"
_SYNTHETIC_SPLITS = ("train", "held_out")
_SYNTHETIC_COLUMNS = frozenset({"prompt", "answer", "a", "b"})
_SYNTHETIC_OPTIONS: dict[str, tuple[type, float, float]] = {  # type, least, most
    "n": (int, 1, 5_000_000),
    "digits": (int, 1, 12),
    "phrasings": (int, 1, 4),
    "held_out": (float, 0.0, 0.99),
    "seed": (int, 0, 2**63 - 1),
    "demonstrations": (bool, False, True),
}


def dataset_is_named(config: Config) -> list[Problem]:
    """There is something to train on, and to validate on."""
    problems, dataset = [], config.train.train_policy.dataset
    if not dataset.name:
        key = f"{_POLICY}.dataset.name"
        hint = f'write {key} = "path/to/data.parquet", or "synthetic:addition" to try it out'
        problems.append(Problem(key, "no dataset is named", "", hint))
    if dataset.test_size is not None and isinstance(dataset.test_size, float) and dataset.test_size >= 1.0:
        key = f"{_POLICY}.dataset.test_size"
        hint = f"write {key} = {int(dataset.test_size)} for rows, or a share below 1.0"
        message = f"a float is a share of the dataset, below 1.0, got {dataset.test_size}"
        problems.append(Problem(key, message, dataset.test_size, hint))
    validation = config.validation
    if validation.dataset.test_size is not None:
        key = "validation.dataset.test_size"
        hint = f"write {_POLICY}.dataset.test_size to hold out training rows"
        problems.append(Problem(key, "has no effect here", validation.dataset.test_size, hint))
    if config.is_grpo and validation.enable and not validation.dataset.name and dataset.name:
        problems += _nothing_held_out(dataset)
    return problems


def _nothing_held_out(dataset: DatasetConfig) -> list[Problem]:
    """Validation without data of its own takes what training holds out."""
    if dataset.test_size:
        return []
    own = f'"{_SYNTHETIC}" for its held-out pairs' if dataset.is_synthetic else '"path/to/heldout.parquet"'
    hint = f"write validation.dataset.name = {own}, or {_POLICY}.dataset.test_size = 0.1"
    related = (f"{_POLICY}.dataset", "validation.enable")
    message = "no dataset is named and the training data holds nothing out"
    return [Problem("validation.dataset.name", message, "", hint, related=related)]


def dataset_can_be_read(config: Config) -> list[Problem]:
    """Local data exists and has the named columns; the built-in generator knows its options."""
    problems = _dataset_problems(
        config, f"{_POLICY}.dataset", config.train.train_policy.dataset, _TRAIN_SPLITS
    )
    if config.is_grpo and config.validation.enable:
        key, dataset = "validation.dataset", config.validation.dataset
        problems += _dataset_problems(config, key, dataset, _VALIDATION_SPLITS)
    return problems


def _dataset_problems(
    config: Config, key: str, dataset: DatasetConfig, default_splits: tuple[str, ...]
) -> list[Problem]:
    path = None if dataset.is_synthetic or not dataset.name else local_path(dataset.name)
    problems = _idle_keys(key, dataset, is_local=path is not None or dataset.is_synthetic)
    columns: set[str] | None = None
    if dataset.is_synthetic:
        problems += _synthetic_problems(key, dataset)
        columns = set(_SYNTHETIC_COLUMNS)
        if dataset.options.get("demonstrations") is True:
            columns.add("conversations")
    elif path is not None:
        try:
            columns = columns_of(path, dataset.splits, default_splits)
        except UnreadableDataError as error:
            endings = ", ".join(DATA_SUFFIXES)
            hint = error.hint or f"paths are relative to the current directory; files end in {endings}"
            problems.append(Problem(f"{key}.name", str(error), dataset.name, hint, related=(f"{key}.split",)))
        if is_file(path) and default_splits == _TRAIN_SPLITS and dataset.splits not in ([], ["train"]):
            message = f"{path} is one file and has no splits"
            problems.append(Problem(f"{key}.split", message, dataset.split, "leave it out"))
    return problems + ([] if columns is None else _column_problems(config, key, dataset, columns))


def _idle_keys(key: str, dataset: DatasetConfig, is_local: bool) -> list[Problem]:
    """Keys that mean nothing for this kind of dataset."""
    related, hint, problems = (f"{key}.name",), "leave it out", []
    if dataset.options and dataset.name and not dataset.is_synthetic:
        message = f"only the built-in generator ({_SYNTHETIC}) takes options"
        problems.append(Problem(f"{key}.options", message, dataset.options, hint, related=related))
    for name in ("subset", "revision"):
        value = getattr(dataset, name)
        if value and is_local:
            message = f"only a dataset on the hub has a {name}"
            problems.append(Problem(f"{key}.{name}", message, value, hint, related=related))
    return problems


def _synthetic_problems(key: str, dataset: DatasetConfig) -> list[Problem]:
    problems = []
    if dataset.name != _SYNTHETIC:
        message = f'there is no generator "{dataset.name}"'
        problems.append(Problem(f"{key}.name", message, dataset.name, f'write {key}.name = "{_SYNTHETIC}"'))
    for split in dataset.splits:
        if split not in _SYNTHETIC_SPLITS:
            hint = f"its splits: {', '.join(_SYNTHETIC_SPLITS)}"
            problems.append(Problem(f"{key}.split", f"{_SYNTHETIC} has no split `{split}`", split, hint))
    for name, value in dataset.options.items():
        option = f"{key}.options.{name}"
        if name not in _SYNTHETIC_OPTIONS:
            close = closest(name, _SYNTHETIC_OPTIONS)
            hint = f"did you mean `{close}`?" if close else f"known here: {', '.join(_SYNTHETIC_OPTIONS)}"
            problems.append(Problem(option, f"unknown option of {_SYNTHETIC}", value, hint))
            continue
        kind, least, most = _SYNTHETIC_OPTIONS[name]
        if kind is bool and not isinstance(value, bool):
            problems.append(Problem(option, "expected true or false", value, f"write {option} = true"))
        elif kind is not bool and not (_is_number(value, kind) and least <= value <= most):
            words = "an integer" if kind is int else "a number"
            message = f"expected {words} from {least} to {most}, got {value!r}"
            problems.append(Problem(option, message, value, f"write {option} = {least}"))
    return problems


def _is_number(value: Any, kind: type) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)


def _column_problems(config: Config, key: str, dataset: DatasetConfig, columns: set[str]) -> list[Problem]:
    problems = []
    for column_key, column, is_default in _wanted_columns(config):
        # A dotted name may reach into a struct; only its first part is a column.
        if not column or column in columns or ("." in column and column.partition(".")[0] in columns):
            continue
        close = closest(column, columns)
        message = f"{dataset.name} does not have the {'default ' if is_default else ''}column `{column}`"
        hint = f'write {column_key} = "{close}"' if close else f"its columns: {', '.join(sorted(columns))}"
        if dataset.is_synthetic and column == "conversations":
            hint = f"write {key}.options.demonstrations = true"
        problems.append(Problem(column_key, message, column, hint, related=(f"{key}.name", f"{key}.options")))
    return problems


def _wanted_columns(config: Config) -> list[tuple[str, str, bool]]:
    """(key, column, whether it is the default) of each column that training reads."""
    if not config.is_grpo:
        name = config.sft.conversation_column_name
        return [(f"{_POLICY}.conversation_column_name", name, name == "conversations")]
    policy = config.grpo
    return [
        (f"{_POLICY}.prompt_column_name", policy.prompt_column, not policy.prompt_column_name),
        (f"{_POLICY}.response_column_name", policy.response_column_name, False),
    ]


def model_is_there(config: Config) -> list[Problem]:
    """A local model is a directory with a config.json; anything else is a name on the hub."""
    key, name = "policy.model_name_or_path", config.policy.model_name_or_path
    path = local_path(name)
    if path is None:
        return []
    if not exists(path):
        relative = "paths are relative to the current directory; a name on the hub has the form owner/name"
        hint = home_hint(name) or relative
        return [Problem(key, f"{name} does not exist", name, hint)]
    if not path.is_dir():
        return [
            Problem(
                key, f"{name} is a file, not a model's directory", name, "name the directory of the model"
            )
        ]
    if not exists(path / "config.json"):
        hint = "name the directory that `save_pretrained` wrote"
        return [Problem(key, f"{name} is no model: it has no config.json", name, hint)]
    if config.policy.model_revision:
        message = "a local model has no revisions"
        return [
            Problem(
                "policy.model_revision", message, config.policy.model_revision, "leave it out", related=(key,)
            )
        ]
    return []


def rewards_are_known(config: Config) -> list[Problem]:
    """Every reward function is built in, or a function in a file that exists."""
    if not config.is_grpo:
        return []
    key, weights = f"{_POLICY}.reward_function", config.grpo.reward_weights
    problems = [_reward_problem(key, name) for name in weights]
    if not weights:
        hint = f'write {key} = "boxed_math", or another of {", ".join(BUILTIN_REWARDS)}'
        problems.append(Problem(key, "no reward function is named", config.grpo.reward_function, hint))
    elif not any(weights.values()):
        message, hint = "all weights are 0: no sample is better than another", "give one of them a weight"
        problems.append(Problem(key, message, weights, hint))
    for name in config.grpo.filter_metrics:
        if name not in weights:
            hint = f"write one of {', '.join(weights)}"
            message = f"`{name}` is not among the reward functions"
            problems.append(Problem(f"{_POLICY}.filter_reward_metric", message, name, hint, related=(key,)))
    problems += [
        _reward_problem("validation.reward_function", name) for name in config.validation.reward_weights
    ]
    return [problem for problem in problems if problem is not None]


def _reward_problem(key: str, name: str) -> Problem | None:
    if name in BUILTIN_REWARDS:
        return None
    file, colon, function = name.rpartition(":")
    if not colon:
        close = closest(name, BUILTIN_REWARDS)
        known = f'built in: {", ".join(BUILTIN_REWARDS)}; your own: "path/to/file.py:function"'
        return Problem(
            key, f"unknown reward function `{name}`", name, f"did you mean `{close}`?" if close else known
        )
    try:
        tree = ast.parse(Path(file).read_bytes(), filename=file)
    except OSError as error:
        hint = home_hint(file) or "paths are relative to the current directory"
        return Problem(key, f"reward file {file} cannot be read: {error.strerror}", name, hint)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" at line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(key, f"reward file {file} is not valid Python{line}: {error}", name)
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if function in functions or function in _bound_names(tree):
        return None
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


def places_can_be_used(config: Config) -> list[Problem]:
    """Directories that will be written are not files, and what is resumed from exists."""
    problems = []
    for key, name in (
        ("train.output_dir", config.train.output_dir),
        ("weight_sync.store", config.weight_sync.store),
    ):
        if "://" in name:
            hint = "write the path of a directory that all machines of the job see"
            problems.append(Problem(key, f"{name} is not a directory", name, hint))
        elif name.startswith("~"):
            problems.append(Problem(key, f"{name} is no path", name, home_hint(name)))
        elif name and is_file(Path(name)):
            problems.append(Problem(key, f"{name} is a file, not a directory", name, "name a directory"))
    resume = config.train.resume
    if isinstance(resume, str) and not (resume and exists(Path(resume))):
        newest = "name a checkpoint's directory, or write train.resume = true for the newest of output_dir"
        hint = home_hint(resume) or newest
        problems.append(Problem("train.resume", f"checkpoint '{resume}' does not exist", resume, hint))
    return problems


DATA_RULES = (
    dataset_is_named,
    dataset_can_be_read,
    model_is_there,
    rewards_are_known,
    places_can_be_used,
)
