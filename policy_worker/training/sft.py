"""Supervised fine-tuning on prepared conversations: the mean of −log π over the tokens to learn.

Rows come in the order of a seeded permutation of each epoch, one batch after the other across epochs; which row is
when is a function of seed and position alone, so a resumed run goes on where it was.

With `[validation]`, the same mean over held-out conversations belongs to a step: it travels with its commit, so that
a step that is trained again is validated again, to the same numbers, and none is counted twice.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch, Segment, TrainSample
from policy_worker.ranges import span
from policy_worker.replicas.base import Alone, Replicas
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Batching, Rows, Shares, plan_step
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.metrics import Metrics, PartSums, SumNotes, mean_norm
from schema.config import Config
from schema.wire.messages import HeldOutLoss, TrainedSample
from schema.wire.prompts import PromptFile, PromptFileError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftBatch:
    """The conversations of a step, numbered in their order."""

    step: int
    samples: dict[int, TrainSample]


class RowOrder:
    """Which row stands at each position of the stream of all epochs."""

    def __init__(self, n_rows: int, data_passes: int, seed: int, shuffle: bool) -> None:
        self._n, self._seed, self._shuffle = n_rows, seed, shuffle
        self.total = n_rows * data_passes
        self._data_pass, self._order = -1, np.arange(n_rows)

    def rows(self, start: int, end: int) -> list[int]:
        """Rows at positions [start, end), fewer at the end of the stream."""
        return [self._row(position) for position in range(start, min(end, self.total))]

    def _row(self, position: int) -> int:
        data_pass, index = divmod(position, self._n)
        if self._shuffle and data_pass != self._data_pass:
            self._order = np.random.default_rng([self._seed, data_pass]).permutation(self._n)
            self._data_pass = data_pass
        return int(self._order[index])


class HeldOut:
    """The held-out conversations: which versions are validated on them, and how well they do."""

    def __init__(self, config: Config, trainer: Trainer, data_file: Path, total_steps: int) -> None:
        """Raises `SettingsError`, see `Sft`."""
        self._trainer, self._total = trainer, total_steps
        self._freq, self._before = config.validation.freq, config.validation.before
        self._data = _open(data_file)
        n_rows = len(self._data)
        learned = [int(self._data.loss_mask(row)[1:].sum()) for row in range(n_rows)]
        self._rows, self._tokens = sum(count > 0 for count in learned), sum(learned)
        if not self._tokens:
            raise SettingsError(f"validation: no conversation in {data_file} has a token to learn")
        batching = Batching.of_config(config).cut_to(config.validation.batch_size, None)
        lengths = self._data.lengths().tolist()
        (plan,) = plan_step(lengths, [count > 0 for count in learned], batching, data_ranks=trainer.group.data_ranks)
        self._batches = plan.ranks[trainer.group.data_rank]

    def is_due(self, version: int) -> bool:
        """Whether the weights after so many steps are validated: the initial ones, every `freq`, and the last."""
        if version == 0:
            return self._before
        return version % self._freq == 0 or version == self._total

    def validate(self, version: int) -> list[HeldOutLoss]:
        """The record of the present weights, the same on each rank; none, and a warning, if a loss is not finite.

        A collective."""
        trainer, sums = self._trainer, [0.0, 0.0]
        with span("validation"):
            for rows in self._batches:
                samples = {row: _sample(self._data, row) for row in rows}
                scored = trainer.score(trainer.model, samples, [rows], fields=("logprobs", "correct"))
                for number, by_row in enumerate(scored):
                    sums[number] += sum(float(values.double().sum()) for values in by_row.values())
            logprobs, correct = trainer.group.all_reduce(sums, "sum")
        loss = -logprobs / self._tokens
        log.info("validation of version %d: loss %.4g", version, loss)
        if not math.isfinite(loss):
            log.warning("validation of version %d has no finite loss: it is not recorded", version)
            return []
        return [
            HeldOutLoss(
                version=version,
                at=time.time(),
                samples=self._rows,
                loss=loss,
                accuracy=correct / self._tokens,
                response_tokens_mean=self._tokens / self._rows,
            )
        ]


def _open(path: Path) -> PromptFile:
    try:
        data = PromptFile(path)
        data.loss_mask(0)
    except PromptFileError as error:
        raise SettingsError(f"supervised training cannot read its data: {error}") from error
    return data


def _sample(data: PromptFile, row: int) -> TrainSample:
    with span("decode"):
        return TrainSample([Segment(data.token_ids(row), data.loss_mask(row), None)])


class Sft:
    """One training step at a time; the loop around it commits."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        data_file: Path,
        held_out: HeldOut | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """replicas: this one and others; None: it trains alone.

        Raises `SettingsError` if the data cannot be read, or is not for supervised training."""
        self._trainer, self._batching = trainer, Batching.of_config(config)
        self._replicas = replicas or Alone()
        self._shares = Shares(self._replicas.parts, trainer.group.data_ranks, trainer.group.data_rank)
        self._batch = config.samples_per_step
        self.kept: list[TrainedSample] = []
        self.validations: list[HeldOutLoss] = []
        self._data = _open(data_file)
        self._held_out = held_out
        shuffle = config.sft.dataloader_shuffle
        self._order = RowOrder(len(self._data), config.train.epoch, config.effective_seed, shuffle)

    def poll(self, step: int, wait_s: float) -> SftBatch:
        """The batch of a step, which never has to be waited for. Raises `DataEnded`."""
        del wait_s
        rows = self._order.rows(step * self._batch, (step + 1) * self._batch)
        if not rows:
            raise DataEnded
        with span("fetch"):
            return SftBatch(step, {number: _sample(self._data, row) for number, row in enumerate(rows)})

    def train_on(self, batch: SftBatch) -> Metrics:
        """One optimizer step on the mean of −log π over all tokens to learn; and the validations that are due."""
        self.validations = self._validate(0) if batch.step == 0 else []
        metrics = self._train_on(batch)
        self.validations = self.validations + self._validate(batch.step + 1)
        return metrics

    def _validate(self, version: int) -> list[HeldOutLoss]:
        held_out = self._held_out
        return held_out.validate(version) if held_out is not None and held_out.is_due(version) else []

    def _train_on(self, batch: SftBatch) -> Metrics:
        trainer, samples = self._trainer, batch.samples
        learned = [sample.learned_tokens for sample in samples.values()]
        tokens = [len(sample.segments[0].token_ids) for sample in samples.values()]
        n_tokens = sum(learned)
        plan = plan_step(tokens, [count > 0 for count in learned], self._batching, data_ranks=self._shares.total)
        sums = PartSums()

        def loss_of(_: MicroBatch, out: TokenOutputs) -> Tensor:
            loss = -out.logprobs.sum() / n_tokens
            sums.add({"loss": loss.detach(), "correct": out.correct.sum()})
            return loss

        for mini_batch in plan:
            ranks = mini_batch.ranks

            def compute(part: int, ranks: list[list[Rows]] = ranks) -> None:
                trainer.learn(samples, ranks[self._shares.of(part)], loss_of)

            self._replicas.learn(trainer, compute, SumNotes(sums, trainer.group))
            sums.end_step(trainer.apply(batch.step))
        metrics = {"tokens": float(sum(tokens)), "samples": float(len(samples)), "lr": trainer.lr(batch.step)}
        metrics |= trainer.scale_metrics()
        for update in sums.reduce(trainer.group):
            metrics |= {"loss": update["loss"], "accuracy": update["correct"] / n_tokens}
            metrics |= mean_norm([update])
        if not math.isfinite(metrics.get("loss", math.nan)):
            log.warning("step %d has no token to learn: it is committed without an update", batch.step)
        return metrics
