"""Supervised fine-tuning on prepared conversations: the mean of −log π over the tokens to learn.

Rows come in the order of a seeded permutation of each epoch, one batch after the other across epochs; where parts of
the data have shares, each has passes and permutations of its own (`schema.wire.mixture`). Which row is when is a
function of seed and position alone, so a resumed run goes on where it was.

With `[validation]`, the same mean over held-out conversations belongs to a step: it travels with its commit, so that
a step that is trained again is validated again, to the same numbers, and none is counted twice.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch, Segment, TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.replicas.base import Alone, Replicas
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Batching, Rows, Shares, plan_step
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.metrics import Metrics, PartSums, SumNotes, mean_norm
from schema.config import Config
from schema.wire.messages import HeldOutLoss, TrainedSample
from schema.wire.mixture import Mixture, Source
from schema.wire.prompts import PromptFile, PromptFileError

log = logging.getLogger(__name__)
LOOK_S = 0.5
"""Seconds between looks at data that are being prepared."""
FOLLOWS_S = 600.0
"""Seconds after which a rank has the file that rank 0 has, at the latest."""


@dataclass(frozen=True)
class SftBatch:
    """The conversations of a step, numbered in their order."""

    step: int
    samples: dict[int, TrainSample]


class RowOrder:
    """Which row stands at each position of the stream of all epochs."""

    def __init__(
        self,
        mixture: Mixture,
        rows: Sequence[Sequence[int]],
        seed: int,
        shuffle: bool,
        most: int | None = None,
        numbers: npt.NDArray[np.float64] | None = None,
        grown: Sequence[int] = (),
    ) -> None:
        """rows: of each source of the mixture, in the order of the data. most: positions that are asked for.

        numbers: of each row, by which each pass goes from the smallest to the largest; None: none are. grown: numbers
        of rows of earlier files (`schema.wire.prompts`): later rows come in an order of their own.
        """
        self._grown = grown
        self._mixture, self._rows, self._seed, self._shuffle = mixture, rows, seed, shuffle
        self._numbers = numbers
        self._places = mixture.order(most)
        self.total = len(self._places)
        self._orders: dict[int, tuple[int, list[int]]] = {}
        """For each source the pass that was asked for last, and its order."""

    @classmethod
    def of_config(cls, config: Config, data: PromptFile) -> RowOrder:
        """The order of prepared rows. Raises `SettingsError` where they are of other sources."""
        policy = config.train.train_policy
        by_column = bool(config.curriculum.column_name)
        rows: dict[Source, Sequence[int]] = {Source("", len(data), early=data.early): range(len(data))}
        try:
            if config.shares:
                stages = [stage.shares for stage in config.curriculum.stage]
                rows = {source: places.tolist() for source, places in data.sources(config.shares, stages).items()}
            numbers = data.order() * (-1 if config.curriculum.descending else 1) if by_column else None
        except PromptFileError as error:
            raise SettingsError(str(error)) from None
        steps, batch = config.train.max_num_steps, config.samples_per_step
        starts = [stage.from_step * batch for stage in config.curriculum.stage]
        if data.unfinished:
            mixture = Mixture.unfinished(list(rows), starts)
        else:
            mixture = Mixture(list(rows), config.train.epoch, policy.domain_exhausted, starts)
        most = None if steps is None else steps * batch
        seed, shuffle = config.effective_seed, policy.dataloader_shuffle
        return cls(mixture, list(rows.values()), seed, shuffle, most, numbers, data.grown)

    def rows(self, start: int, end: int) -> list[int]:
        """Rows at positions [start, end), fewer at the end of the stream."""
        return [self._row(position) for position in range(start, min(end, self.total))]

    def _row(self, position: int) -> int:
        data_pass, index, source = self._mixture.place(int(self._places[position]))
        rows = self._rows[source]
        known = self._orders.get(source)
        if known is None or known[0] != data_pass:
            name = self._mixture.sources[source].name
            key = [self._seed, data_pass, *([crc32(name.encode())] if name else [])]
            early = 0 if data_pass else self._mixture.sources[source].early
            order = self._order(len(rows), early, key)
            if self._numbers is not None:
                order = order[np.argsort(self._numbers[np.asarray(rows)[order]], kind="stable")]
            known = self._orders[source] = data_pass, order.tolist()
        return int(rows[known[1][index]])

    def _order(self, n: int, early: int, key: list[int]) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(n)
        parts = []
        for start, end in pairwise(sorted({0, *self._grown, early, n})):
            rng = np.random.default_rng([*key, start] if start else key)
            parts.append(start + rng.permutation(end - start))
        return np.concatenate(parts)


class OrderedRows:
    """The prepared rows, in the order of training; a job may begin while some are being prepared.

    All ranks have the same rows at the same time: rank 0 says how many there are, and the others wait for their file
    to have them, too.
    """

    def __init__(self, config: Config, group: RankGroup, path: Path) -> None:
        """A collective. Raises `SettingsError` if they cannot be read, or are not for supervised training."""
        self._config, self._group, self._path = config, group, path
        self._data = _open(path)
        self._order = RowOrder.of_config(config, self._data)
        self._unread_since: float | None = None
        """When the file could not be read for the first time since it last was."""
        (unfinished,) = group.all_reduce([float(self._data.unfinished)], "max")
        self._awaits = bool(unfinished)
        """Whether rows may be missing on some rank."""

    def _open_again(self) -> None:
        """Look whether all rows are there. Raises `SettingsError`: it cannot be read for long, or is another file."""
        try:
            data = _open(self._path)
        except SettingsError as error:
            self._unread_since = self._unread_since or time.monotonic()
            if time.monotonic() - self._unread_since > FOLLOWS_S:
                raise
            log.warning("%s", error)
            return
        self._unread_since = None
        if self._data.early_digest != data.early_digest:
            raise SettingsError(f"{self._path} has other rows than those that the job began with: begin a new run")
        self._data, self._order = data, RowOrder.of_config(self._config, data)

    def reach(self, end: int, wait_s: float) -> bool:
        """Whether all positions below `end` have their rows, after so many seconds at most. A collective."""
        if not self._awaits:
            return True
        reached, whole = self._group.lead(lambda: self._look(end, wait_s))
        if reached and not self._wait(end, FOLLOWS_S, whole=whole):
            raise SettingsError(f"{self._path} on this machine does not have the rows that rank 0 has: share it")
        self._awaits = not whole
        return bool(reached)

    def _look(self, end: int, wait_s: float) -> tuple[bool, bool]:
        """Whether the rows are there, and whether all are."""
        return self._wait(end, wait_s), not self._data.unfinished

    def _wait(self, end: int, seconds: float, *, whole: bool = False) -> bool:
        """Wait for rows, or for all of them; False: they have not come in time."""
        give_up = time.monotonic() + seconds
        while self._data.unfinished and (whole or end > self._order.total):
            if time.monotonic() > give_up:
                return False
            time.sleep(LOOK_S)
            self._open_again()
        return True

    def samples(self, start: int, end: int) -> list[TrainSample]:
        """The rows at positions [start, end), fewer at the end of the stream."""
        return [_sample(self._data, row) for row in self._order.rows(start, end)]


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
        self._rows = OrderedRows(config, trainer.group, data_file)
        self._held_out = held_out

    def poll(self, step: int, wait_s: float) -> SftBatch | None:
        """The batch of a step; None: not all of its rows are prepared after so many seconds. Raises `DataEnded`."""
        start = step * self._batch
        if not self._rows.reach(start + self._batch, wait_s):
            return None
        with span("fetch"):
            samples = self._rows.samples(start, start + self._batch)
        if not samples:
            raise DataEnded
        return SftBatch(step, dict(enumerate(samples)))

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
