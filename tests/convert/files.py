"""The complete files of these tests, and small ones made for one question."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convert import convert_text
from convert.engine.keys import lookup, split_key, store
from convert.engine.model import Conversion

HERE = Path(__file__).parent / "examples"
ROOT = Path(__file__).parents[2]
VERL = sorted(HERE.glob("verl_*.yaml"))
ROLL = sorted(HERE.glob("roll_*.yaml"))
COSMOS = sorted(HERE.glob("cosmos_*.toml"))

_BASE = {
    "pretrain": "org/model",
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "prompt_length": 1024,
    "response_length": 1024,
    "adv_estimator": "grpo",
    "track_with": "stdout",
    "actor_train.training_args.per_device_train_batch_size": 1,
    "actor_train.training_args.gradient_accumulation_steps": 32,
    "actor_train.strategy_args.strategy_name": "fsdp2_train",
    "actor_train.device_mapping": "list(range(0,16))",
    "actor_infer.strategy_args.strategy_name": "vllm",
    "actor_infer.device_mapping": "list(range(16,24))",
    "rewards.math_rule.worker_cls": "roll.rewards.MathRuleRewardWorker",
}


def roll_with(changes: dict[str, Any] | None = None) -> Conversion:
    """A small RLVR file with these keys (dotted; ABSENT leaves one out), converted."""
    keys = {**_BASE, **(changes or {})}
    return convert_text(yaml_text(nest({key: value for key, value in keys.items() if value is not ABSENT})))


ABSENT = object()
"""Instead of a value: the key is left out."""


def nest(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables."""
    table: dict[str, Any] = {}
    for key, value in keys.items():
        store(table, split_key(key), value)
    return table


def under(prefix: str, names: str) -> list[str]:
    """The dotted keys of names below a prefix."""
    return [f"{prefix}.{name}" for name in names.split()]


def yaml_text(table: dict[str, Any]) -> str:
    """A table as YAML."""
    import yaml

    return yaml.safe_dump(table, sort_keys=False, allow_unicode=True)


def value_of(conversion: Conversion, key: str) -> Any:
    """The value of one of our keys; None where it is not written."""
    return lookup(conversion.config, split_key(key))


def values_of(conversion: Conversion, keys: Iterable[str]) -> dict[str, Any]:
    """The values of these keys."""
    return {key: value_of(conversion, key) for key in keys}
