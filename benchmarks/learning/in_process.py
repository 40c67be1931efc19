"""A job in one process: trainer and embedded engine take turns, and every sample is exactly `lag` steps old.

    prompts of the step ─▶ engine with the weights of version max(0, t − lag) ─▶ rewards ─▶ batch ─▶ trainer

Trainer, engine, prepared data and wire format are those of a job; controller, store and processes are left out.
The module sets nothing: a script sets threads and paths before it imports this.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine.snapshot import Snapshot
from benchmarks.trainer.material import as_batch
from controller.client import Answer, Call
from controller.data.prepare import prepare
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from policy_worker.training.metrics import Metrics
from policy_worker.worker import make_trainer
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import Engine, GenerationRequest
from rollout_worker.groups.leasing import training_settings, validation_settings
from rollout_worker.groups.pushing import to_sample
from rollout_worker.rewards.functions import BUILTIN
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.prompts import PromptFile
from schema.wire.sample import Sample, sample_seed
from tokenization.loading import load

Alter = Callable[[Trainer, list[list[Sample]]], None]


class Served:
    """Answers the trainer's question for a batch from memory."""

    def __init__(self) -> None:
        self.batch = b""

    def call(self, call: Call[bytes | None]) -> bytes | None:
        return call.read(Answer(200, self.batch))


class Learned(NamedTuple):
    """What the trainer reported of each step, and the share of right answers on held-out prompts at the end."""

    metrics: list[Metrics]
    accuracy: float


class Generator:
    """The engine's half: groups of scored samples."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Any, data: Path) -> None:
        """data: a run directory that `controller.data.prepare` has filled."""
        self._config, self.engine, self._tokenizer = config, engine, tokenizer
        self._train = PromptFile(data / "data" / "train.safetensors")
        self._held_out = PromptFile(data / "data" / "validation.safetensors")

    async def groups(self, step: int) -> list[list[Sample]]:
        """The groups of one step, prompts in order; a greedy sample last where the estimator needs one."""
        config, n = self._config, self._config.groups_per_step
        positions = range(step * n, (step + 1) * n)
        greedy = config.rollout.n_generation if config.grpo.has_baseline else None
        weights = config.grpo.reward_weights
        asked = self._leased(self._train, positions, "train", config.group_size, greedy)
        return await self._generate(asked, weights, training_settings(config))

    async def accuracy(self) -> float:
        """Mean score of the held-out prompts as `[validation]` draws and scores them, one answer each."""
        config = self._config
        asked = self._leased(self._held_out, range(len(self._held_out)), "validation", 1, None)
        made = await self._generate(asked, config.validation_rewards[""], validation_settings(config))
        return sum(sample.header.score or 0.0 for (sample,) in made) / len(made)

    def _leased(
        self, data: PromptFile, positions: range, kind: Any, size: int, greedy: int | None
    ) -> list[LeasedGroup]:
        seed = self._config.effective_seed
        rows = [position % len(data) for position in positions]
        return [
            LeasedGroup(
                group_id=f"e0-p{position}", lease_id="none", kind=kind, epoch=0, position=position, attempt=1,
                prompt_token_ids=data.token_ids(row).tolist(), row=data.row(row), deadline=0, greedy=greedy,
                seeds=[sample_seed(seed, kind, 0, position, i) for i in range(size)],
            )
            for position, row in zip(positions, rows, strict=True)
        ]  # fmt: skip

    async def _generate(
        self, groups: list[LeasedGroup], weights: dict[str, float], settings: Any
    ) -> list[list[Sample]]:
        named = {group.group_id: group for group in groups}
        self.engine.submit(
            [
                GenerationRequest(
                    name, group.prompt_token_ids, tuple(group.seeds), settings, group.greedy is not None
                )
                for name, group in named.items()
            ]
        )
        done: dict[str, dict[int, Sample]] = {name: {} for name in named}
        while any(len(samples) < len(named[name].seeds) for name, samples in done.items()):
            for made in await self.engine.collect():
                group = named[made.request_id]
                text = self._tokenizer.decode(made.token_ids, skip_special_tokens=True)
                rewards = {name: BUILTIN[name](text, group.row) for name in weights}
                score = sum(weights[name] * value for name, value in rewards.items())
                done[made.request_id][made.index] = to_sample(
                    group, made.index, made, made.finish_reason, error=None, rewards=rewards, score=score
                )
        return [[samples[i] for i in range(len(samples))] for samples in done.values()]


async def learn(config: Config, folder: Path, steps: int, lag: int = 0, alter: Alter | None = None) -> Learned:
    """Train `steps` steps on samples of the weights `lag` steps before, and validate once at the end.

    folder: where data are prepared, once for all that train on the same. alter: what is done to a step's samples
    before the trainer gets them.
    """
    if not (folder / "data" / "train.safetensors").exists():
        prepare(config, folder)
    group = RankGroup(RankEnvironment())
    try:
        trainer = make_trainer(config, group, steps, None)
        served = Served()
        algorithm = Grpo(config, trainer, BatchSource(group, served.call, 1, lag))
        tokenizer = load(*config.policy.tokenizer)
        engine = create_engine(config, tokenizer, frozenset([tokenizer.eos_token_id]))
        await engine.start()
        try:
            generator = Generator(config, engine, tokenizer, folder)
            versions = {0: Snapshot.of(trainer.model.lm)}
            found = []
            for step in range(steps):
                version = max(0, step - lag)
                if version != engine.version:
                    await engine.load_weights(versions[version], version)
                groups = await generator.groups(step)
                if alter is not None:
                    alter(trainer, groups)
                served.batch = as_batch(step, groups)
                table = algorithm.poll(step, 0.0)
                assert table is not None
                metrics = algorithm.train_on(table)
                assert metrics is not None
                found.append(metrics)
                versions[step + 1] = Snapshot.of(trainer.model.lm)
                versions = {v: w for v, w in versions.items() if v > version or v == engine.version}
            await engine.load_weights(versions[steps], steps)
            return Learned(found, await generator.accuracy())
        finally:
            await engine.close()
    finally:
        group.close()
