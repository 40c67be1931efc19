"""Supervised fine-tuning on prepared conversations: the mean of −log π over the tokens to learn.

Rows come in the order of a seeded permutation of each epoch, one batch after the other across epochs; which row is
when is a function of seed and position alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch, Segment, TrainSample
from policy_worker.process import ShutdownRequest
from policy_worker.trainer import ShareOfLoss, Trainer
from policy_worker.training.batch_plan import plan_step
from policy_worker.training.grpo import micro_batch_rule
from policy_worker.training.step_end import End
from schema.config import Config
from schema.wire.prompts import PromptFile, PromptFileError

log = logging.getLogger(__name__)


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

    def __init__(self, config: Config, trainer: Trainer, data_file: Path, shutdown: ShutdownRequest) -> None:
        self._trainer, self._shutdown = trainer, shutdown
        self._rule, self._balance = micro_batch_rule(config), config.sft.balance_dp_token
        self._batch = config.samples_per_step
        try:
            self._data = PromptFile(data_file)
            self._data.loss_mask(0)
        except PromptFileError as error:
            raise SettingsError(f"supervised training cannot read its data: {error}") from error
        shuffle = config.sft.dataloader_shuffle
        self._order = RowOrder(len(self._data), config.train.epoch, config.effective_seed, shuffle)

    def train(self, step: int) -> dict[str, float] | End:
        """Train on the batch of a step; its metrics, or why there was no step."""
        if self._trainer.group.any(bool(self._shutdown)):
            return End.ASKED
        rows = self._order.rows(step * self._batch, (step + 1) * self._batch)
        if not rows:
            return End.NO_DATA
        samples = dict(enumerate(self._sample(row) for row in rows))
        learned = [sample.learned_tokens for sample in samples.values()]
        tokens = [len(sample.segments[0].token_ids) for sample in samples.values()]
        group = self._trainer.group
        plan = plan_step(
            tokens,
            [count > 0 for count in learned],
            world=group.world,
            rule=self._rule,
            balance=self._balance,
        )
        metrics = {"tokens": float(sum(tokens)), "samples": float(len(rows)), "lr": self._trainer.lr(step)}
        n_tokens = sum(learned)
        for piece in plan:
            batches = [self._trainer.micro_batch(samples, micro) for micro in piece.ranks[group.rank]]
            result = self._trainer.optimizer_step(batches, likelihood_loss(n_tokens), step=step)
            metrics |= {
                "loss": result.sums["loss"],
                "accuracy": result.sums["correct"] / n_tokens,
                "grad_norm": result.grad_norm,
            }
        if not math.isfinite(metrics.get("loss", math.nan)):
            log.warning("step %d has no token to learn: it is committed without an update", step)
        return metrics

    def _sample(self, row: int) -> TrainSample:
        return TrainSample([Segment(self._data.token_ids(row), self._data.loss_mask(row), None)])


def likelihood_loss(n_tokens: int) -> ShareOfLoss:
    """−Σ log π / N over the tokens to learn, N those of the whole optimizer step."""

    def share(_: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -outputs.logprobs.sum() / n_tokens
        return loss, {"loss": loss.detach(), "correct": outputs.correct.sum()}

    return share
