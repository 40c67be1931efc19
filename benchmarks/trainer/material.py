"""What training steps are measured on: a policy of random weights, and a batch as the controller sends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from policy_worker.model.model import PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from schema.config import Config
from schema.wire.batch import StepTable, encode_batch
from schema.wire.sample import Sample, SampleHeader, encode_sample

VOCABULARY, GROUPS, GROUP = 512, 8, 8
PROMPT, ANSWER = 32, 96
"""Tokens of a prompt, and of the longest answer."""
SHAPES = {"0.3M": (64, 4, 256, 4), "5M": (256, 6, 1024, 4), "20M": (512, 6, 1536, 8)}
"""Hidden size, layers, inner size, heads."""


def language_model(size: str, kind: Any = AutoModelForCausalLM, seed: int = 0, **changes: Any) -> Any:
    """A model of random weights. kind: the class of transformers that makes it. changes: of its configuration."""
    hidden, layers, inner, heads = SHAPES[size]
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    return kind.from_config(Qwen2Config(**{**shape, **changes}))


def config_of(sections: dict[str, Any]) -> Config:
    """Plain GRPO on a batch of these samples, and what is written over it, by section."""
    data: dict[str, Any] = {
        "train": {
            "param_dtype": "float32", "compile": False, "train_batch_per_replica": GROUPS * GROUP,
            "metrics_of_all_samples": True, "optm_warmup_steps": 0,
            "train_policy": {"type": "grpo", "mini_batch": 16},
        },
        "policy": {
            "model_name_or_path": "unused", "model_gradient_checkpointing": False,
            "parallelism": {"tp_size": 1},
        },
        "rollout": {"n_generation": GROUP, "parallelism": {"tp_size": 1}},
    }  # fmt: skip
    for section, keys in sections.items():
        *above, last = section.split(".")
        table = data
        for name in above:
            table = table.setdefault(name, {})
        table[last] = keys if isinstance(keys, list) else {**table.get(last, {}), **keys}
    return Config.model_validate(data)


def samples(prompt: int = PROMPT, longest: int = ANSWER) -> list[list[Sample]]:
    """Groups of samples with answers of half to all of the longest."""
    rng = np.random.default_rng(0)
    groups: list[list[Sample]] = []
    for _ in range(GROUPS):
        start = rng.integers(0, VOCABULARY, prompt)
        groups.append([])
        for index, n in enumerate(rng.integers(longest // 2, longest + 1, GROUP).tolist()):
            header = SampleHeader(
                index=index, prompt_tokens=prompt, response_tokens=n, total_tokens=prompt + n, oldest_version=0,
                newest_version=0, finish_reason="stop", rewards={"right": float(index % 2)}, score=float(index % 2),
            )  # fmt: skip
            logprobs = np.minimum(-np.log(VOCABULARY) + rng.normal(0, 0.1, n), 0)
            groups[-1].append(
                Sample(
                    header,
                    np.concatenate([start, rng.integers(0, VOCABULARY, n)]).astype(np.int32),
                    (np.arange(prompt + n) >= prompt).astype(np.uint8),
                    np.concatenate([np.zeros(prompt), logprobs]).astype(np.float32),
                    np.array([0, prompt], np.int32),
                    np.array([-1, 0], np.int32),
                )
            )
    return groups


def as_batch(step: int, groups: Sequence[Sequence[Sample]], wanted: str = "all") -> bytes:
    """What the controller answers the trainer: the table of all samples, and the payloads of the wanted rows."""
    made = [sample for group in groups for sample in group]
    columns = {
        name: [getattr(sample.header, name) for sample in made]
        for name in (
            "index", "score", "prompt_tokens", "response_tokens", "total_tokens", "oldest_version",
            "newest_version", "finish_reason", "baseline",
        )
    }  # fmt: skip
    table = StepTable(
        step=step, timeline=0, policy_epoch=1, group_ids=[f"g{i}" for i in range(len(groups))],
        group=[i for i, group in enumerate(groups) for _ in group],
        rewards={name: [sample.header.rewards[name] for sample in made] for name in made[0].header.rewards},
        **columns,
    )  # fmt: skip
    rows = {"all": range(len(made)), "none": ()}.get(wanted)
    chosen = map(int, wanted.split(",")) if rows is None else rows
    return encode_batch(table, [encode_sample(made[row]) for row in chosen])


def step_of(
    group: RankGroup, config: Config, model: PolicyModel, made: Sequence[Sequence[Sample]], *,
    reference: PolicyModel | None = None, critic: Critic | None = None,
    teachers: Mapping[str, PolicyModel] = MappingProxyType({}),
) -> Callable[[], None]:  # fmt: skip
    """A function that trains one step of a batch, always the same one."""
    trainer = Trainer(model, config, group, Schedule(1000), reference, critic, teachers)
    answer = cache(partial(as_batch, 0, made))
    source = BatchSource(group, lambda call: answer(call.params["samples"]), 1, 0)
    algorithm = Grpo(config, trainer, source)

    def step() -> None:
        table = algorithm.poll(0, 0.0)
        assert table is not None
        assert algorithm.train_on(table) is not None

    return step
