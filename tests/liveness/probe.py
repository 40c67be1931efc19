"""How a key is shown to act: a job, two values of the key, and code of the project whose answer they change.

    watch(observe, base, {"train.optm_lr": (1e-3, 1e-4), …})

`observe(config, place)` runs the real code and returns something that can be compared. A probe holds iff two
observations of the first value agree and the second value's differs. Both values must be accepted by all checks
of the configuration, except where the table says that the second is refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from schema.config import Config
from tests.schema.config_samples import write
from tests.support.effort import SOAK

Values = dict[str, Any]
Base = Callable[["Place"], dict[str, Any]]
Observe = Callable[[Config, "Place"], Any]


@dataclass(frozen=True)
class With:
    """A value that needs other keys as well."""

    value: Any
    others: Values


@dataclass(frozen=True)
class Made:
    """A value that needs a place: a file, an address."""

    make: Callable[[Place], Any]


@dataclass(frozen=True)
class Whole:
    """A value that needs another job: the base that has it."""

    base: Base


UNSET = Made(lambda place: UNSET)
"""The key is not written."""


@dataclass
class Place:
    """What observers may use; everything in it ends with the tests that share it."""

    root: Path
    stack: ExitStack
    _numbers: Any = field(default_factory=itertools.count)
    _first: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)

    def first(self, observe: Observe, config: Config) -> tuple[Any, Any]:
        """An observation of a probe's first value and, in `make soak`, a second one that has to agree.

        Kept, since probes share their first values.
        """
        key = observe.__name__, config.model_dump_json()
        if key not in self._first:
            seen = observe(config, self)
            self._first[key] = seen, observe(config, self) if SOAK else seen
        return self._first[key]

    def directory(self) -> Path:
        """A fresh one."""
        path = self.root / f"at-{next(self._numbers)}"
        path.mkdir()
        return path

    def file(self, name: str, text: str) -> Path:
        """A file with this text, the same path for the same text."""
        path = self.root / f"{abs(hash(text)):x}" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """A jsonl file of these rows."""
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    @cached_property
    def model(self) -> Path:
        """A tiny model with a tokenizer and a chat template."""
        return self.tiny_model("model", 0)

    @cached_property
    def other_model(self) -> Path:
        """Another one."""
        return self.tiny_model("other-model", 1)

    def tiny_model(self, name: str, seed: int) -> Path:
        """Save a model of a few thousand parameters."""
        from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer
        from tests.rollout_worker.tiny import random_model

        path = self.root / name
        random_model(seed, vocab_size=259, hidden_size=32, intermediate_size=48, head_dim=8).save_pretrained(path)
        return save_tokenizer(path, PLAIN_TEMPLATE)

    @cached_property
    def group(self) -> Any:
        """A replica of one rank."""
        import torch

        from policy_worker.parallel.rank_group import RankGroup
        from policy_worker.process import RankEnvironment

        torch.set_num_threads(1)
        group = RankGroup(RankEnvironment())
        self.stack.callback(group.close)
        return group

    @cached_property
    def valkey(self) -> Any:
        """A server that keeps what it is given."""
        from tests.support.valkey import running_valkey

        return self.stack.enter_context(running_valkey())


@dataclass(frozen=True)
class Probe:
    """One key, and how it is seen to act."""

    key: str
    values: tuple[Any, Any]
    observe: Observe
    base: Base
    refused: bool

    def __str__(self) -> str:
        return f"{self.key} [{self.observe.__name__}]"

    def data(self, number: int, place: Place) -> dict[str, Any]:
        """The configuration with the first or the second value, as a user would write it."""
        value = self.values[number]
        if isinstance(value, Whole):
            return value.base(place)
        data = deepcopy(self.base(place))
        if isinstance(value, With):
            for key, other in value.others.items():
                write(data, key.split("."), _made(other, place))
            value = value.value
        value = _made(value, place)
        if value is not UNSET:
            write(data, self.key.split("."), value)
        return data


def _made(value: Any, place: Place) -> Any:
    return value.make(place) if isinstance(value, Made) else value


PROBES: list[Probe] = []


def under(section: str, **values: Any) -> Values:
    """Keys of one section by their full names: `under("train", seed=1)` is {"train.seed": 1}."""
    return {f"{section}.{name}": value for name, value in values.items()}


def watch(observe: Observe, base: Base, values: Mapping[str, tuple[Any, Any]], *, refused: bool = False) -> None:
    """Register probes that share an observation. refused: the checks refuse the second value by name."""
    PROBES.extend(Probe(key, pair, observe, base, refused) for key, pair in values.items())


def same(a: Any, b: Any) -> bool:
    """Equality; arrays are equal within rounding, so that a changed order of sums is no change."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-7)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def grpo(place: Place) -> dict[str, Any]:
    """A small job of reinforcement learning that passes all checks."""
    return {
        "train": {
            "compile": False,
            "param_dtype": "float32",
            "optm_impl": "foreach",
            "optm_lr": 1e-3,
            "optm_warmup_steps": 0,
            "train_batch_per_replica": 8,
            "train_policy": {
                "type": "grpo",
                "reward_function": "boxed_math",
                "response_column_name": "answer",
                "dataset": {"name": "synthetic:addition", "options": {"n": 24}},
            },
        },
        "policy": {
            "model_name_or_path": str(place.model),
            "model_max_length": 128,
            "model_gradient_checkpointing": False,
            "parallelism": {"tp_size": 1},
        },
        "rollout": {
            "backend": "transformers",
            "max_response_length": 16,
            "n_generation": 4,
            "parallelism": {"tp_size": 1},
        },
    }


def vllm(place: Place) -> dict[str, Any]:
    """The same on vLLM."""
    data = grpo(place)
    data["rollout"]["backend"] = "vllm"
    return data


def sft(place: Place) -> dict[str, Any]:
    """A small supervised job that passes all checks."""
    data = grpo(place)
    del data["rollout"]
    options = {"n": 24, "demonstrations": True}
    data["train"]["train_policy"] = {"type": "sft", "dataset": {"name": "synthetic:addition", "options": options}}
    return data


def changed(base: Base, values: Values) -> Base:
    """A base with some keys written; dotted keys, values may be `Made`."""

    def make(place: Place) -> dict[str, Any]:
        data = base(place)
        for key, value in values.items():
            write(data, key.split("."), _made(value, place))
        return data

    return make
