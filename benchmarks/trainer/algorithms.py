"""What the parts of an algorithm cost: a training step with each of them next to plain GRPO.

    python -m benchmarks.trainer.algorithms [--rounds 9] [--memory]

One trainer for each variant, all on the same 8 groups of 8 samples (prompts of 32 tokens, answers of up to 96),
with models of random weights. They take turns; a figure is the median over the rounds of a variant's CPU time (which
neighbours on a busy machine hardly change) over that of plain GRPO. "forward only" is a pass that only scores, over
the same micro-batches. --memory adds the peak of the log-probs of 4,096 tokens over 50,000 words, above what is there
before: plain, with the KL over the whole vocabulary, and in one piece instead of chunks.

Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen2Config

from benchmarks import harness  # noqa: F401
from policy_worker.model.logprobs import Beside, Head, token_kl, token_logprobs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import TrainSample
from policy_worker.model.model import PolicyModel, ValueModel, prepare_model
from policy_worker.parallel.group import Group, RankEnvironment
from policy_worker.trained.critic import Critic
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from schema.config import Config
from schema.wire.batch import StepTable, encode_batch
from schema.wire.sample import Sample, SampleHeader, encode_sample

VOCABULARY, GROUPS, GROUP, PROMPT, ANSWER = 512, 8, 8, 32, 96
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reference, k3": {"train.train_policy": {"kl_beta": 0.01}},
    "reference, full": {"train.train_policy": {"kl_beta": 0.01, "kl_type": "full"}},
    "KL in the reward": {"train.train_policy": {"kl_in_reward": {"beta": 0.01}}},
    "decoupled loss": {"train.train_policy": {"use_decoupled_loss": True}},
    "correction": {
        "train.train_policy": {
            "rollout_correction": {"weights": "sequence", "reject": "geometric", "reject_above": 1.5}
        }
    },
    "critic": {
        "train.train_policy": {"advantage_estimator": "gae"},
        "critic": {"enable": True, "param_dtype": "float32", "mini_batch": 16},
    },
    "teacher, advantage": {"teacher": [{"name": "one", "model": "unused"}]},
    "teacher, JSD of 20": {"teacher": [{"name": "one", "model": "unused", "loss": "top_k_jsd"}]},
}
"""What each writes over plain GRPO, by section."""


def config_of(variant: dict[str, Any]) -> Config:
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
    for section, keys in variant.items():
        *above, last = section.split(".")
        table = data
        for name in above:
            table = table.setdefault(name, {})
        table[last] = keys if isinstance(keys, list) else {**table.get(last, {}), **keys}
    return Config.model_validate(data)


def model_of(seed: int) -> PolicyModel:
    return prepare_model(PolicyModel(backbone(seed, AutoModelForCausalLM)), packed=False, recompute=False)


def critic_of(seed: int) -> ValueModel:
    return prepare_model(ValueModel(backbone(seed, AutoModel)), packed=False, recompute=False)


def backbone(seed: int, kind: Any) -> Any:
    """A model of random weights. kind: the class of transformers that makes it."""
    torch.manual_seed(seed)
    return kind.from_config(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=6, intermediate_size=1024,
            num_attention_heads=4, num_key_value_heads=2,
        )
    )  # fmt: skip


def samples() -> list[Sample]:
    rng, found = np.random.default_rng(0), []
    for _ in range(GROUPS):
        prompt = rng.integers(0, VOCABULARY, PROMPT)
        for index, n in enumerate(rng.integers(ANSWER // 2, ANSWER + 1, GROUP).tolist()):
            header = SampleHeader(
                index=index, prompt_tokens=PROMPT, response_tokens=n, total_tokens=PROMPT + n, oldest_version=0,
                newest_version=0, finish_reason="stop", rewards={"right": float(index % 2)}, score=float(index % 2),
            )  # fmt: skip
            logprobs = np.minimum(-np.log(VOCABULARY) + rng.normal(0, 0.1, n), 0)
            found.append(
                Sample(
                    header,
                    np.concatenate([prompt, rng.integers(0, VOCABULARY, n)]).astype(np.int32),
                    (np.arange(PROMPT + n) >= PROMPT).astype(np.uint8),
                    np.concatenate([np.zeros(PROMPT), logprobs]).astype(np.float32),
                    np.array([0, PROMPT], np.int32),
                    np.array([-1, 0], np.int32),
                )
            )
    return found


def batch_of(made: list[Sample], wanted: str = "all") -> bytes:
    """What a controller sends: the table of all samples, and the payloads of those that are wanted."""
    rows = {"all": list(range(len(made))), "none": []}.get(wanted)
    headers = [sample.header for sample in made]
    columns = {
        name: [getattr(header, name) for header in headers]
        for name in (
            "index", "score", "prompt_tokens", "response_tokens", "total_tokens", "oldest_version",
            "newest_version", "finish_reason",
        )
    }  # fmt: skip
    table = StepTable(
        step=0, timeline=0, policy_epoch=1, group_ids=[f"g{i}" for i in range(GROUPS)],
        group=[i for i in range(GROUPS) for _ in range(GROUP)],
        rewards={"right": columns["score"]}, **columns,
    )  # fmt: skip
    rows = [int(row) for row in wanted.split(",")] if rows is None else rows
    return encode_batch(table, [encode_sample(made[row]) for row in rows])


def step_of(group: Group, variant: dict[str, Any], answer: bytes) -> Callable[[], None]:
    """A function that trains one step of a variant, always the same one."""
    config = config_of(variant)
    reference = model_of(1) if config.has_reference else None
    critic = Critic(critic_of(2), config, group, Schedule(10)) if config.has_critic else None
    teachers = {one.name: model_of(3) for one in config.local_teachers}
    trainer = Trainer(model_of(0), config, group, Schedule(10), reference, critic, teachers)
    source = BatchSource(group, lambda _: answer, 1, 0)
    algorithm = Grpo(config, trainer, source)

    def step() -> None:
        table = algorithm.poll(0, 0.0)
        assert table is not None
        assert algorithm.train_on(table) is not None

    return step


def forward_only(group: Group, made: list[Sample]) -> Callable[[], None]:
    trainer = Trainer(model_of(0), config_of({}), group, Schedule(10))
    rows = {row: TrainSample.of_wire(sample) for row, sample in enumerate(made)}
    cut = [list(range(start, start + 16)) for start in range(0, len(made), 16)]

    def score() -> None:
        trainer.score(trainer.model, rows, cut)

    return score


def peak_mib(work: Callable[[], Any]) -> float:
    """The most memory of this process while it works, above what it had."""
    process, done, peak = psutil.Process(), threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    gc.collect()
    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return (peak - before) / 2**20


def memory() -> dict[str, float]:
    hidden, head = (
        torch.randn(4096, 256, requires_grad=True),
        Head(torch.randn(50_000, 256, requires_grad=True)),
    )
    labels = torch.randint(0, 50_000, (4096,))
    beside = Beside(torch.randn(4096, 256), Head(torch.randn(50_000, 256)))
    return {
        "log-probs": peak_mib(lambda: token_logprobs(hidden, head, labels, 1.0).logprobs.sum().backward()),
        "with full KL": peak_mib(
            lambda: (
                (token_logprobs(hidden, head, labels, 1.0).logprobs + token_kl(hidden, head, beside, 1.0))
                .sum()
                .backward()
            )
        ),
        "in one piece": peak_mib(
            lambda: torch.log_softmax(hidden @ head.weight.T, -1).gather(1, labels[:, None]).sum().backward()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant after one that warms up")
    parser.add_argument("--memory", action="store_true", help="measure the peak of the log-probs too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    group, made = Group(RankEnvironment()), samples()
    answer = batch_of(made)
    steps = {name: step_of(group, variant, answer) for name, variant in VARIANTS.items()}
    steps["forward only"] = forward_only(group, made)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(time.process_time() - began)
    plain = times["grpo"][1:]
    print(f"plain GRPO: {statistics.median(plain) * 1e3:.0f} ms of CPU time a step")
    found: dict[str, Any] = {
        name: round(statistics.median(a / b for a, b in zip(values[1:], plain, strict=True)), 2)
        for name, values in times.items()
    }
    if options.memory:
        found["peak_mib"] = {name: round(value) for name, value in memory().items()}
    for name, value in found.items():
        print(f"{name:>18}  {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
