"""Supervised fine-tuning on prepared conversations: the mean of −log π over the tokens to learn.

Rows come in the order of a seeded permutation of each epoch, one batch after the other across epochs; which row is
when is a function of seed and position alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from policy_worker.errors import SettingsError
from policy_worker.model.micro_batch import Segment, TrainSample
from policy_worker.ranges import span
from policy_worker.trainer import Trainer
from policy_worker.training.batch_plan import Batching, plan_step
from policy_worker.training.batch_source import DataEnded
from policy_worker.training.metrics import Metrics, PartSums
from schema.config import Config
from schema.wire.messages import TrainedSample
from schema.wire.prompts import PromptFile, PromptFileError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftBatch:
    """The conversations of a step, numbered in their order."""

    step: int
    samples: dict[int, TrainSample]


class RowOrder:
    """Which row stands at each position of the stream of all epochs."""

    def __init__(self, n_rows: int, epochs: int, seed: int, shuffle: bool) -> None:
        self._n, self._seed, self._shuffle = n_rows, seed, shuffle
        self.total = n_rows * epochs
        self._epoch, self._order = -1, np.arange(n_rows)

    def rows(self, start: int, end: int) -> list[int]:
        """Rows at positions [start, end), fewer at the end of the stream."""
        return [self._row(position) for position in range(start, min(end, self.total))]

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self._n)
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._n)
            self._epoch = epoch
        return int(self._order[index])


class Sft:
    """One training step at a time; the loop around it commits."""

    def __init__(self, config: Config, trainer: Trainer, data_file: Path) -> None:
        """Raises `SettingsError` if the data cannot be read, or is not for supervised training."""
        self._trainer, self._batching = trainer, Batching.of_config(config)
        self._batch = config.samples_per_step
        self.kept: list[TrainedSample] = []
        try:
            self._data = PromptFile(data_file)
            self._data.loss_mask(0)
        except PromptFileError as error:
            raise SettingsError(f"supervised training cannot read its data: {error}") from error
        shuffle = config.sft.dataloader_shuffle
        self._order = RowOrder(len(self._data), config.train.epoch, config.effective_seed, shuffle)

    def poll(self, step: int, wait_s: float) -> SftBatch:
        """The batch of a step, which never has to be waited for. Raises `DataEnded`."""
        del wait_s
        rows = self._order.rows(step * self._batch, (step + 1) * self._batch)
        if not rows:
            raise DataEnded
        with span("fetch"):
            return SftBatch(step, dict(enumerate(map(self._sample, rows))))

    def train_on(self, batch: SftBatch) -> Metrics:
        """One optimizer step on the mean of −log π over all tokens to learn."""
        trainer, samples = self._trainer, batch.samples
        learned = [sample.learned_tokens for sample in samples.values()]
        tokens = [len(sample.segments[0].token_ids) for sample in samples.values()]
        n_tokens = sum(learned)
        plan = plan_step(
            tokens, [count > 0 for count in learned], self._batching, data_ranks=trainer.data_ranks
        )
        sums = PartSums()
        for mini_batch in plan:
            for micro_batch in trainer.micro_batches(samples, mini_batch.ranks[trainer.data_rank]):
                out = trainer.forward(micro_batch)
                with span("loss"):
                    loss = -out.logprobs.sum() / n_tokens
                trainer.backward(loss)
                sums.add({"loss": loss.detach(), "correct": out.correct.sum()})
            sums.end_step(trainer.step(batch.step))
        metrics = {"tokens": float(sum(tokens)), "samples": float(len(samples)), "lr": trainer.lr(batch.step)}
        for found in sums.reduce(trainer.group):
            metrics |= {
                "loss": found["loss"],
                "accuracy": found["correct"] / n_tokens,
                "grad_norm": found["grad_norm"],
            }
        if not math.isfinite(metrics.get("loss", math.nan)):
            log.warning("step %d has no token to learn: it is committed without an update", batch.step)
        return metrics

    def _sample(self, row: int) -> TrainSample:
        with span("decode"):
            return TrainSample([Segment(self._data.token_ids(row), self._data.loss_mask(row), None)])
