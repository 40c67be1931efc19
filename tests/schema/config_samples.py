"""Configurations that the tests of `schema.config` start from."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

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


def write(data: dict[str, Any], path: list[str] | tuple[str, ...], value: Any) -> None:
    """Write one value, with the tables around it."""
    for part in path[:-1]:
        data = data.setdefault(part, {})
    data[path[-1]] = value
