"""Models, optimizer and schedule of this rank, and the verbs of a training step, for every algorithm.

    score: forward, of the model that is trained or of a frozen one                    log-probs, before training
    for batch in micro_batches(…):  forward ─▶ (the algorithm's loss) ─▶ backward      gradients add up
    step: clip ─▶ AdamW                                                                once per optimizer step

A micro-batch's loss is already divided by the counts of the whole optimizer step, so losses add up over
micro-batches; over data ranks FSDP2 averages, hence the factor of their number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.drawn import Reshaping
from policy_worker.model.logprobs import Beside, TokenOutputs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import LEAST_SPARED, Columns, Layout, MicroBatch, TrainSample, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.optim import Optimizer, OptimizerSettings
from policy_worker.parallel.fsdp import apply_fsdp, local_of, needs_sharding, set_last_micro_batch, whole
from policy_worker.parallel.group import Group
from policy_worker.ranges import span
from schema.config import Config
from schema.config.layout import reference_layout

log = logging.getLogger(__name__)

HIDDEN = "hidden"
"""The column with the reference model's hidden states, [n_i, D] of each sample."""


def beside(batch: MicroBatch, head: Tensor | None) -> Beside | None:
    """The reference model's distributions at the tokens of a batch, if its output matrix is given."""
    return None if head is None else Beside(batch.columns[HIDDEN], head)


class Trainer:
    """See the module's docstring. reference: the frozen model of the KL terms, in the type it computes in."""

    def __init__(
        self,
        model: PolicyModel,
        config: Config,
        group: Group,
        schedule: Schedule,
        reference: PolicyModel | None = None,
    ) -> None:
        train = config.train
        self.group, self.schedule = group, schedule
        self.sharded = needs_sharding(group.data_ranks, train)
        takes_blocks = all(one.takes_blocks for one in (model, reference) if one is not None)
        self.least_spared = LEAST_SPARED.get(group.device.type) if takes_blocks else None
        """Part of a step's tokens from which on samples share their prompts; None: never."""
        how = Reshaping.of_config(config)
        self._layout = Layout(train.sequence_packing, model.vocabulary, group.device, self.least_spared, how)
        self._reference_is_apart = reference_layout(config) is not None
        self._reference_layout = replace(
            self._layout, device=group.second_device() if self._reference_is_apart else group.device
        )
        self.model = apply_fsdp(model, group.mesh(), train) if self.sharded else model.to(group.device)
        self.reference = None if reference is None else self._frozen(reference, config)
        grpo = config.grpo if config.is_grpo else None
        self.reset_interval = (grpo.reference_reset_interval or 0) if grpo and reference is not None else 0
        """Steps between two resets of the reference model; 0: it stays."""
        self.adapts_kl = grpo is not None and grpo.kl_in_reward.controller == "adaptive"
        self.kl_coefficient = grpo.kl_in_reward.beta if grpo else 0.0
        """β of the KL in the reward, as it is now."""
        if self.reset_interval:
            self._check_alike()
        self.optimizer = Optimizer(self.model.parameters(), OptimizerSettings.of_config(train))

    def _frozen(self, model: PolicyModel, config: Config) -> PolicyModel:
        model.requires_grad_(False).eval()
        offload = config.reference.offload
        if self._reference_is_apart:
            log.info("reference model: on %s, whole", self._reference_layout.device)
        if self._reference_is_apart or (self.group.data_ranks == 1 and not offload):
            return model.to(self._reference_layout.device)
        return apply_fsdp(model, self.group.mesh(), config.train, frozen=True, offload=offload)

    def _check_alike(self) -> None:
        mine, theirs = (
            {name: p.shape for name, p in m.named_parameters()} for m in (self.model, self.reference) if m
        )
        if mine != theirs:
            raise SettingsError(
                f"train.train_policy.reference_reset_interval = {self.reset_interval} makes the reference model a "
                f"copy of the policy, and reference.model_name_or_path has other shapes: leave one of them out"
            )

    @torch.no_grad()
    def reference_head(self) -> Tensor:
        """The reference model's output matrix, whole. A collective if it is sharded."""
        assert self.reference is not None
        return self.reference.whole_head().to(self.group.device)

    @torch.no_grad()
    def reset_reference(self, optimizer: bool) -> None:
        """The reference model becomes a copy of the present one; optimizer: whose state is forgotten too.

        A collective if it has devices of its own.
        """
        assert self.reference is not None
        part = whole if self._reference_is_apart else local_of
        for new, old in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            part(old).copy_(part(new))
        if optimizer:
            self.optimizer.forget()

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank trains on."""
        return self.group.data_rank

    @property
    def data_ranks(self) -> int:
        """Into how many shares a batch is cut."""
        return self.group.data_ranks

    def micro_batches(
        self,
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
        columns: Columns = MappingProxyType({}),
    ) -> Iterator[MicroBatch]:
        """Tensors of this rank's micro-batches of one optimizer step (at least one, the same number on each rank).

        batches: the rows of each, out of `samples`. columns: what `score` found for them. Gradients are reduced in
        the backward of the last one.
        """
        for number, rows in enumerate(batches, 1):
            set_last_micro_batch(self.model, number == len(batches))
            yield collate([samples[row] for row in rows], rows, self._layout, columns)

    @torch.no_grad()
    def score(
        self,
        model: PolicyModel,
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
        temperature: float = 1.0,
        fields: Sequence[str] = ("logprobs",),
        columns: Columns = MappingProxyType({}),
        head: Tensor | None = None,
    ) -> list[dict[int, Tensor]]:
        """For each of these `TokenOutputs`: by row, of the learned tokens of each sample, on the CPU. A collective.

        batches: the rows of each micro-batch, equally many on each rank. columns, head: see `forward`.
        """
        found: list[dict[int, Tensor]] = [{} for _ in fields]
        layout = self._reference_layout if model is self.reference else self._layout
        for rows in batches:
            batch = collate([samples[row] for row in rows], rows, layout, columns)
            with torch.accelerator.device_index(layout.device.index):
                outputs = model(batch, temperature, beside(batch, head), "hidden" in fields)
            sizes = [samples[row].learned_tokens for row in rows]
            for field, of_rows in zip(fields, found, strict=True):
                of_rows.update(zip(rows, getattr(outputs, field).cpu().split(sizes), strict=True))
        return found

    def forward(
        self, batch: MicroBatch, temperature: float = 1.0, head: Tensor | None = None
    ) -> TokenOutputs:
        """Log-probs and entropy of the batch's K labels, with gradient.

        head: the output matrix of the reference model; then also the KL to it, of the states in column `HIDDEN`.
        """
        with span("forward"):
            outputs: TokenOutputs = self.model(batch, temperature, beside(batch, head))
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
