"""The critic as a model that learns: its values, and its devices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.model.model import ValueModel
from policy_worker.model.stages import StageInput
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.model_mesh import arranged
from schema.config import Config
from schema.config.layout import critic_layout, mesh_of, reference_layout

log = logging.getLogger(__name__)


class Critic(TrainedModel):
    """The value model. With devices of its own (`placement.critic`) it is sharded over those of all data ranks."""

    def __init__(self, model: ValueModel, config: Config, group: RankGroup, schedule: Schedule) -> None:
        apart, group = critic_layout(config) is not None, arranged(config, "critic", group)
        super().__init__(
            model,
            config.critic,
            group,
            schedule,
            parallelism=mesh_of(config, "critic"),
            packed=config.train.sequence_packing,
            takes_blocks=model.takes_blocks,
            device=group.other_device(2 if reference_layout(config) else 1) if apart else None,
            dispatcher=config.policy.dispatcher,
        )
        if apart:
            log.info("critic: on %s", self.mesh.layout.device)

    @torch.no_grad()
    def values(self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """By row, what is expected of each learned token of each sample, on the CPU. A collective; see `score`."""
        by_row: dict[int, Tensor] = {}

        def keep(batch: MicroBatch, values: Tensor) -> None:
            sizes = [samples[row].learned_tokens for row in batch.rows]
            by_row.update(zip(batch.rows, values.cpu().split(sizes), strict=True))

        with self.without_dropout():
            laid_out = self.mesh.laid_out(samples, batches, {})
            self.mesh.score(self.model.stages, laid_out, self.forward, keep)
        return self.mesh.in_unit(by_row, samples, batches)

    def forward(self, batch: MicroBatch, entry: StageInput | None = None) -> Tensor:
        """The value of what stands before each of the batch's K labels, with gradient."""
        with span("critic forward"), self._here():
            values: Tensor = self.model(batch, entry)
        return values

    def backward(self, loss: Tensor) -> None:
        with self._here():
            super().backward(loss)

    def step(self, step: int) -> float:
        with self._here():
            return super().step(step)

    def _here(self) -> AbstractContextManager[None]:
        return torch.accelerator.device_index(self.mesh.layout.device.index)
