"""Configurations that the tests of `schema.config` start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from schema.config import Config, ConfigError, Problem, check_rules
from schema.config.loading.explain import annotation_of

GRPO: dict[str, Any] = {
    "train": {
        "compile": False,
        "train_policy": {
            "type": "grpo",
            "reward_function": "boxed_math",
            "response_column_name": "answer",
            "dataset": {"name": "synthetic:addition"},
        },
    },
    "policy": {"model_name_or_path": "Qwen/Qwen3-0.6B", "parallelism": {"tp_size": 1}},
    "rollout": {"backend": "transformers", "parallelism": {"tp_size": 1}},
}

SFT: dict[str, Any] = {
    "train": {
        "compile": False,
        "train_policy": {
            "type": "sft",
            "dataset": {"name": "synthetic:addition", "options": {"demonstrations": True}},
        },
    },
    "policy": {"model_name_or_path": "Qwen/Qwen3-0.6B", "parallelism": {"tp_size": 1}},
}


def changed(base: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy with dotted keys written, dots as double underscores: `train__epoch=3`."""
    data = deepcopy(base)
    for name, value in values.items():
        write(data, name.split("__"), value)
    return data


def problems(base: dict[str, Any] = GRPO, **values: Any) -> list[Problem]:
    """What the rules alone say of a changed configuration, whatever this build can do."""
    return check_rules(Config.model_validate(changed(base, **values)))


def only(base: dict[str, Any] = GRPO, **values: Any) -> Problem:
    """Their one problem."""
    (problem,) = problems(base, **values)
    return problem


def refused(function: Callable[..., object], *arguments: object, **named: object) -> list[Problem]:
    """The problems with which a function refuses its arguments."""
    try:
        function(*arguments, **named)
    except ConfigError as error:
        return list(error.problems)
    raise AssertionError("it is not refused")


def write(data: dict[str, Any], path: list[str] | tuple[str, ...], value: Any) -> None:
    """Write one value, with the tables around it; of a list of tables into the first."""
    for part in path[:-1]:
        found = data.setdefault(part, {})
        data = found[0] if isinstance(found, list) else found
    data[path[-1]] = value


def other_value(key: str, known: Sequence[Any]) -> Any:
    """A value that the schema accepts for a key and that is none of the known ones."""
    for value in _candidates(annotation_of(tuple(key.split(".")))):
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            continue
        try:
            Config.model_validate(nested(key, value))
        except ValidationError:
            continue
        return value
    raise AssertionError(f"no other value is known for {key}")


def nested(key: str, value: Any) -> dict[str, Any]:
    """One key as a mapping; `train.train_policy` with the tag that knows it."""
    data: dict[str, Any] = {}
    write(data, key.split("."), value)
    return data


def _candidates(annotation: Any) -> Iterator[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _candidates(arguments[0])
    elif origin is Literal:
        yield from arguments
    elif origin is list:
        for item in _candidates(arguments[0]):
            yield [item]
            yield [item, item]
    elif origin is dict:
        for item in _candidates(arguments[1]) if arguments else [1]:
            yield {"name": item}
    elif arguments:
        for part in arguments:
            yield from _candidates(part)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield {}
    else:
        yield from {bool: (True, False), int: (1, 2, 7), float: (0.5, 0.25, 2.0), str: ("other", "x.py:f")}.get(
            annotation, (1,)
        )
