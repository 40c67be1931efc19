"""Model, optimizer and schedule of this rank: what both algorithms train with.

    for micro-batch: log-probs ─▶ share of the loss ─▶ backward      gradients add up
    clip ─▶ AdamW                                                    once per optimizer step

A share of the loss is already divided by the counts of the whole optimizer step, so shares add up over
micro-batches; over ranks FSDP2 averages, hence the factor of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import Layout, MicroBatch, TrainSample, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.optim import Optimizer, OptimizerSettings
from policy_worker.parallel.fsdp import apply_fsdp, needs_sharding, set_last_micro_batch
from policy_worker.parallel.group import Group
from schema.config import Config

ShareOfLoss = Callable[[MicroBatch, TokenOutputs], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, what the model says of it) -> (scalar to differentiate, detached sums; "max_…": maxima)."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: sums over all micro-batches and ranks, and the gradient norm before clipping."""

    sums: dict[str, float]
    grad_norm: float


class Trainer:
    """See the module's docstring."""

    def __init__(self, model: PolicyModel, config: Config, group: Group, schedule: Schedule) -> None:
        train = config.train
        self.group, self.schedule = group, schedule
        self.sharded = needs_sharding(group.world, train)
        self._layout = Layout(train.sequence_packing, model.vocabulary, group.device)
        self.model = apply_fsdp(model, group.mesh(), train) if self.sharded else model.to(group.device)
        self.optimizer = Optimizer(self.model.parameters(), OptimizerSettings.of_config(train))

    def optimizer_step(
        self,
        micro_batches: Sequence[MicroBatch],
        share_of_loss: ShareOfLoss,
        *,
        step: int,
        temperature: float = 1.0,
    ) -> StepResult:
        """Train on one optimizer step's micro-batches of this rank (at least one, the same number on each).

        Raises:
            NonFiniteGradientError: see `Optimizer.step`.
        """
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches):
            set_last_micro_batch(self.model, number == len(micro_batches) - 1)
            outputs = self.model(batch, temperature)
            share, parts = share_of_loss(batch, outputs)
            (share * self.group.world).backward()
            for name, value in parts.items():
                if name not in sums:
                    sums[name] = value
                else:
                    sums[name] = torch.maximum(sums[name], value) if _is_max(name) else sums[name] + value
        grad_norm = self.optimizer.step(self.schedule.factor(step))
        return StepResult(self._over_ranks(sums), grad_norm)

    def micro_batch(self, samples: Mapping[int, TrainSample], rows: Sequence[int]) -> MicroBatch:
        """Tensors of these rows, on this rank's device."""
        return collate([samples[row] for row in rows], rows, self._layout)

    def lr(self, step: int) -> float:
        """Learning rate of a training step."""
        return self.optimizer.peak_lr * self.schedule.factor(step)

    def _over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        names = list(sums)
        local = dict(zip(names, torch.stack([sums[name].float() for name in names]).tolist(), strict=True))
        result: dict[str, float] = {}
        for how, chosen in (
            ("max", [n for n in names if _is_max(n)]),
            ("sum", [n for n in names if not _is_max(n)]),
        ):
            if chosen:
                result |= zip(chosen, self.group.reduce([local[n] for n in chosen], how), strict=True)
        return result


def _is_max(name: str) -> bool:
    return name.startswith("max_")
