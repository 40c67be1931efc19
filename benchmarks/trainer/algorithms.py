"""What the parts of an algorithm cost: a training step with each of them next to plain GRPO.

    python -m benchmarks.trainer.algorithms [--rounds 9]

One trainer for each variant, all on the same 8 groups of 8 samples (prompts of 32 tokens, answers of up to 96), with
models of 5M parameters and random weights. They take turns; a figure is the median over the rounds of a variant's CPU
time (which neighbours on a busy machine hardly change) over that of plain GRPO. "forward only" is a pass that only
scores, over the same micro-batches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import AutoModel

from benchmarks.harness import in_turns, options, ratio, report, timed
from benchmarks.trainer.material import ANSWER, PROMPT, config_of, language_model, samples, step_of
from policy_worker.model.micro_batch import TrainSample
from policy_worker.model.model import PolicyModel, ValueModel
from policy_worker.model.prepare import prepare_model
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.wire.sample import Sample

PLAIN = "grpo"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
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
"""The keys that each writes over plain GRPO, by section."""


def policy(seed: int) -> PolicyModel:
    return prepare_model(PolicyModel(language_model("5M", seed=seed)), packed=False, recompute=False)


def variant_of(group: RankGroup, keys: dict[str, Any], made: list[list[Sample]]) -> Callable[[], None]:
    """A function that trains one step of a variant."""
    config, critic = config_of(keys), None
    if config.has_critic:
        values = ValueModel(language_model("5M", AutoModel, seed=2))
        critic = Critic(prepare_model(values, packed=False, recompute=False), config, group, Schedule(10))
    return step_of(
        group, config, policy(0), made, reference=policy(1) if config.has_reference else None, critic=critic,
        teachers={teacher.name: policy(3) for teacher in config.local_teachers},
    )  # fmt: skip


def forward_only(group: RankGroup, made: Sequence[Sequence[Sample]]) -> Callable[[], object]:
    trainer = Trainer(policy(0), config_of({}), group, Schedule(10))
    rows = dict(enumerate(TrainSample.of_wire(sample) for of_group in made for sample in of_group))
    cut = [list(range(start, start + 16)) for start in range(0, len(rows), 16)]
    return lambda: trainer.score(trainer.model, rows, cut)


def main() -> None:
    given = options(__doc__, rounds=9, answer=(ANSWER, "tokens of the longest answer"))
    group, made = RankGroup(RankEnvironment()), samples(PROMPT, given.answer)
    steps: dict[str, Callable[[], object]] = {name: variant_of(group, keys, made) for name, keys in VARIANTS.items()}
    steps["forward only"] = forward_only(group, made)
    ways = {name: partial(timed, step, time.process_time) for name, step in steps.items()}
    times = in_turns(ways, given.rounds)
    ratios = {name: ratio(taken, times[PLAIN]) for name, taken in times.items()}
    report(
        given,
        ratios | {"grpo_cpu_s": statistics.median(times[PLAIN])},
        {name: {"over plain": found} for name, found in ratios.items()},
    )


if __name__ == "__main__":
    main()
