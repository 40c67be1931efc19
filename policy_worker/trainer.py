"""Model, optimizer and schedule of this rank, and the verbs of a training step, for every algorithm.

    for batch in micro_batches(…):  forward ─▶ (the algorithm's loss) ─▶ backward      gradients add up
    step: clip ─▶ AdamW                                                                once per optimizer step

A micro-batch's loss is already divided by the counts of the whole optimizer step, so losses add up over
micro-batches; over ranks FSDP2 averages, hence the factor of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import Layout, MicroBatch, TrainSample, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.optim import Optimizer, OptimizerSettings
from policy_worker.parallel.fsdp import apply_fsdp, needs_sharding, set_last_micro_batch
from policy_worker.parallel.group import Group
from policy_worker.ranges import span
from schema.config import Config


class Trainer:
    """See the module's docstring."""

    def __init__(self, model: PolicyModel, config: Config, group: Group, schedule: Schedule) -> None:
        train = config.train
        self.group, self.schedule = group, schedule
        self.sharded = needs_sharding(group.world, train)
        self._layout = Layout(train.sequence_packing, model.vocabulary, group.device)
        self.model = apply_fsdp(model, group.mesh(), train) if self.sharded else model.to(group.device)
        self.optimizer = Optimizer(self.model.parameters(), OptimizerSettings.of_config(train))

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank trains on."""
        return self.group.rank

    @property
    def data_ranks(self) -> int:
        """Into how many shares a batch is cut."""
        return self.group.world

    def micro_batches(
        self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]]
    ) -> Iterator[MicroBatch]:
        """Tensors of this rank's micro-batches of one optimizer step (at least one, the same number on each rank).

        batches: the rows of each, out of `samples`. Gradients are reduced in the backward of the last one.
        """
        for number, rows in enumerate(batches, 1):
            set_last_micro_batch(self.model, number == len(batches))
            yield collate([samples[row] for row in rows], rows, self._layout)

    def forward(self, batch: MicroBatch, temperature: float = 1.0) -> TokenOutputs:
        """Log-probs and entropy of the batch's K labels, with gradient."""
        with span("forward"):
            outputs: TokenOutputs = self.model(batch, temperature)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        with span("backward"):
            (loss * self.data_ranks).backward()

    def step(self, step: int) -> float:
        """One optimizer step at the learning rate of training step `step`; the gradient norm before clipping.

        Raises:
            NonFiniteGradientError: see `Optimizer.step`.
        """
        with span("optimizer"):
            return self.optimizer.step(self.schedule.factor(step))

    def lr(self, step: int) -> float:
        """Learning rate of a training step."""
        return self.optimizer.peak_lr * self.schedule.factor(step)
