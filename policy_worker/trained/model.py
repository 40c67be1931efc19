"""A model that learns, and the verbs of a training step, for every algorithm.

    learn: of each micro-batch  forward ─▶ the loss ─▶ backward            gradients add up
    apply: clip ─▶ optimizer                                               once per optimizer step

The loss comes as a function, so that it is computed where a model's outputs are. A micro-batch's loss is already
divided by the counts of the whole optimizer step, so losses add up over micro-batches; over ranks FSDP2 averages,
hence the factor of their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policy_worker.memory.offload import Gradients
from policy_worker.model.logits.drawn import Reshaping
from policy_worker.model.micro_batch import BatchLayout, Columns, MicroBatch, TrainSample, collate, least_spared
from policy_worker.model.model import DTYPES, Backbone, More
from policy_worker.parallel.collectives import finish_gradients
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.fsdp import Units, reduce_gradients, set_last_micro_batch
from policy_worker.parallel.loss_scale import LossScaler, scaled_by
from policy_worker.parallel.pipeline import Pipeline, copies_in
from policy_worker.parallel.pipeline_schedule import Pipe
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model_mesh import ModelMesh, numbers_of
from policy_worker.trained.optim import Optimizer
from schema.config import CriticConfig, TrainingConfig
from schema.config.sections.policy import ParallelismConfig
from weight_sync.hf_names import Gather

LossOf = Callable[[MicroBatch, Any], Tensor]
"""(a micro-batch, what `forward` computes of it) → its part of an optimizer step's loss."""
MoreOf = Callable[[MicroBatch], More | None]
"""(a micro-batch) → what its forward computes besides; see `PolicyModel.forward`."""


class TrainedModel(ABC):
    """A model that learns, on this rank: sharded, with optimizer and schedule.

    group: the ranks as they stand for it. parallelism: its mesh's sizes. takes_blocks: whether every model that the
    layout serves does. device: where it is; None: that of the rank. reshaping: what its log-probs are of. dispatcher:
    see `policy_worker.parallel.experts`."""

    def __init__(
        self,
        model: Backbone,
        keys: TrainingConfig | CriticConfig,
        group: RankGroup,
        schedule: Schedule,
        *,
        parallelism: ParallelismConfig,
        packed: bool,
        takes_blocks: bool,
        device: torch.device | None = None,
        reshaping: Reshaping = Reshaping(),  # noqa: B008
        dispatcher: str = "alltoall",
    ) -> None:
        self.group, self.schedule = group, schedule
        apart, device = device is not None, device or group.device
        self.least_spared = (
            least_spared(device, DTYPES[keys.param_dtype], model.head_widths) if takes_blocks else None
        )
        """Part of a step's tokens from which on samples share their prompts; None: never."""
        sizes = group.sizes
        spared, piece = self.least_spared, sizes.piece(group.rank)
        mixtures = None if model.routing_replay is None else model.routing_replay.mixtures
        layout = BatchLayout(
            packed, model.vocabulary, device, spared, reshaping, sizes.cp, piece, sizes.parts, mixtures
        )
        section = "critic" if isinstance(keys, CriticConfig) else "train"
        Units.of_config(keys).check(model, section)
        self._pipeline = Pipeline(group, Pipe.of_config(parallelism)) if sizes.pp > 1 else None
        self.mesh = ModelMesh(group, layout, numbers_of(keys), self._pipeline)
        if self._pipeline is not None:
            self._pipeline.cut(model)
        with torch.accelerator.device_index(device.index):
            self.model = distribute(model, group, keys, device if apart else None, dispatcher=dispatcher)
            self.optimizer = Optimizer.of_model(self.model, keys, section)
        offloads = keys.fsdp_gradient_offload and not keys.fsdp_offload  # by which FSDP2 has them on the host
        self._gradients = Gradients(self.optimizer.parameters) if offloads else None
        narrow = scaled_by(keys)
        self.scaler = LossScaler(group, f"{section}.{narrow}") if narrow else None
        """Scales losses, where gradients would vanish in float16."""
        if self.scaler is not None:
            self.optimizer.skips = self.scaler.skips
        self._dropouts = [m for m in self.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        if self._pipeline is not None:
            self.optimizer.copies = copies_in(self.model)
            self.optimizer.total_norm = self._pipeline.total_norm

    def micro_batches(
        self,
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
        columns: Columns = MappingProxyType({}),
    ) -> Iterator[MicroBatch]:
        """Tensors of this rank's micro-batches of one optimizer step (at least one, the same number on each rank).

        batches: the rows of each, out of `samples`. columns: what `score` found for them. The backward of one comes
        before the next one is asked for."""
        for number, rows in enumerate(batches, 1):
            last = number == len(batches)
            set_last_micro_batch(self.model, last)
            yield collate([samples[row] for row in rows], rows, self.mesh.layout, columns)
            if not last:
                reduce_gradients(self.model, last)

    def learn(
        self,
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
        loss_of: LossOf,
        columns: Columns = MappingProxyType({}),
        **asked: Any,
    ) -> None:
        """Add up the gradients of an optimizer step. A collective.

        samples, batches, columns: see `micro_batches`. loss_of: called once for each micro-batch, in order. asked:
        further arguments of `forward`. Only where the last stage of a pipeline is there are outputs, and losses."""
        if self._pipeline is None:
            for batch in self.micro_batches(samples, batches, columns):
                outputs = self.forward(batch, **asked)
                with span("loss"):
                    loss = loss_of(batch, outputs)
                self.backward(loss)
            return

        def loss_share(batch: MicroBatch, outputs: Any) -> Tensor:
            with span("loss"):
                return loss_of(batch, outputs) * self._loss_factor

        laid_out = self.mesh.laid_out(samples, batches, columns)
        self._pipeline.learn(self.model, laid_out, partial(self.forward, **asked), loss_share)

    @abstractmethod
    def forward(self, batch: MicroBatch, *asked: Any, **named: Any) -> Any:
        """Compute a micro-batch by the model, or by one of its stages, with gradient."""

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Compute with the weights themselves, not with a part of an adapter, as before training."""
        for module in self._dropouts:
            module.eval()
        try:
            yield
        finally:
            for module in self._dropouts:
                module.train()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        with span("backward"):
            (loss * self._loss_factor).backward()

    @property
    def _loss_factor(self) -> float:
        """Against the average over ranks, and for gradients in float16."""
        return self.group.sizes.fsdp_ranks * (1.0 if self.scaler is None else self.scaler.scale)

    def step(self, step: int) -> float:
        """One optimizer step of what was learned; see `apply`."""
        self.end_part()
        return self.apply(step)

    def end_part(self) -> None:
        """The gradients of what was learned are complete: those of its samples, over all ranks. A collective."""
        with span("gradients"):
            reduce_gradients(self.model)
            if self._gradients is not None:
                self._gradients.bring_back()
            finish_gradients(self.model)
            if self._pipeline is not None:
                self._pipeline.share_gradients(self.model)

    def seed_dropouts(self, of: Sequence[int]) -> None:
        """Let what dropout leaves out from here on depend on these numbers alone."""
        if self._dropouts:
            torch.manual_seed(int(np.random.SeedSequence(of).generate_state(1, np.uint64)[0]) >> 1)

    def apply(self, step: int) -> float:
        """One optimizer step with the gradients that there are, at the learning rate of training step `step`; the
        gradient norm before clipping, NaN where the step was skipped.

        Raises `NonFiniteGradientError`: see `Optimizer.step`."""
        with span("optimizer"):
            if self.scaler is not None:
                self.scaler.unscale(self.optimizer.parameters)
            return self.optimizer.step(self.schedule.factor(step), self.schedule.progress(step))

    def scale_metrics(self) -> dict[str, float]:
        """The loss scale, and optimizer steps skipped since this was asked last; nothing without a scaler."""
        return {} if self.scaler is None else self.scaler.metrics()

    def gather_to_first(self, gather: Gather) -> Gather:
        """By name of a tensor of the whole transformers model, that tensor on rank 0. A collective. gather: of the
        tensors of this rank, on all ranks that have them."""
        return gather if self._pipeline is None else self._pipeline.to_first(self.model, gather)

    def lr(self, step: int) -> float:
        """Learning rate of a training step."""
        return self.optimizer.peak_lr * self.schedule.factor(step)
