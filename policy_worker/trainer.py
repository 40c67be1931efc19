"""Models, optimizers and schedules of this rank, and the verbs of a training step, for every algorithm.

    score: forward, of a model that is trained or of a frozen one          log-probs or values, before training
    learn: of each micro-batch  forward ─▶ the loss ─▶ backward            gradients add up
    step: clip ─▶ optimizer                                                once per optimizer step

The loss comes as a function, so that it is computed where a model's outputs are.

The trainer is the policy, with frozen models next to it, a reference where a KL term needs one and the teachers, and
a critic, trained by the same verbs, where advantages need values.

A micro-batch's loss is already divided by the counts of the whole optimizer step, so losses add up over
micro-batches; over ranks FSDP2 averages, hence the factor of their number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from policy_worker.errors import SettingsError
from policy_worker.model.drawn import Reshaping
from policy_worker.model.logprobs import Beside, Head, TokenOutputs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import LEAST_SPARED, Columns, Layout, MicroBatch, TrainSample, collate
from policy_worker.model.model import Backbone, More, PolicyModel, ValueModel
from policy_worker.model.optim import Optimizer
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.experts import expert_layers
from policy_worker.parallel.fsdp import local_of, needs_sharding, set_last_micro_batch, whole
from policy_worker.parallel.group import Group
from policy_worker.parallel.parts import finish_gradients
from policy_worker.ranges import span
from schema.config import Config, CriticConfig, TrainingConfig
from schema.config.layout import critic_layout, reference_is_within, reference_layout

log = logging.getLogger(__name__)

HIDDEN = "hidden"
"""The column with the reference model's hidden states, [n_i, D] of each sample."""
LossOf = Callable[[MicroBatch, Any], Tensor]
"""(a micro-batch, what `forward` computes of it) → its part of an optimizer step's loss."""
MoreOf = Callable[[MicroBatch], More | None]
"""(a micro-batch) → what its forward computes besides; see `PolicyModel.forward`."""


def beside(batch: MicroBatch, head: Head | None) -> Beside | None:
    """The reference model's distributions at the tokens of a batch, if its output head is given."""
    return None if head is None else Beside(batch.columns[HIDDEN], head)


class TrainedModel:
    """A model that learns, on this rank: sharded, with optimizer and schedule.

    takes_blocks: whether every model that the layout serves does. device: where it is; None: that of the rank.
    reshaping: what its log-probs are of. dispatcher: see `policy_worker.parallel.experts`.
    """

    def __init__(
        self,
        model: Backbone,
        keys: TrainingConfig | CriticConfig,
        group: Group,
        schedule: Schedule,
        *,
        packed: bool,
        takes_blocks: bool,
        device: torch.device | None = None,
        reshaping: Reshaping = Reshaping(),  # noqa: B008
        dispatcher: str = "alltoall",
    ) -> None:
        self.group, self.schedule = group, schedule
        own, device = device is not None, device or group.device
        self.sharded = needs_sharding(group.sizes.fsdp_ranks, keys)
        self.least_spared = LEAST_SPARED.get(device.type) if takes_blocks else None
        """Part of a step's tokens from which on samples share their prompts; None: never."""
        sizes = group.sizes
        self._layout = Layout(
            packed, model.vocabulary, device, self.least_spared, reshaping, sizes.cp, sizes.piece(group.rank)
        )
        section = "critic" if isinstance(keys, CriticConfig) else "train"
        with torch.accelerator.device_index(device.index):
            self.model = distribute(model, group, keys, device if own else None, dispatcher=dispatcher)
            self.optimizer = Optimizer.of_model(self.model, keys, section)
        self._dropouts = [m for m in self.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]

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
        further arguments of `forward`.
        """
        for batch in self.micro_batches(samples, batches, columns):
            outputs = self.forward(batch, **asked)
            with span("loss"):
                loss = loss_of(batch, outputs)
            self.backward(loss)

    def forward(self, batch: MicroBatch, **asked: Any) -> Any:
        """What the model computes of a micro-batch, with gradient."""
        raise NotImplementedError

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """What is computed before training is of the weights themselves, not of a part of an adapter."""
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
            (loss * self.group.sizes.fsdp_ranks).backward()

    def step(self, step: int) -> float:
        """One optimizer step at the learning rate of training step `step`; the gradient norm before clipping.

        Raises:
            NonFiniteGradientError: see `Optimizer.step`.
        """
        with span("optimizer"):
            finish_gradients(self.model)
            return self.optimizer.step(self.schedule.factor(step), self.schedule.progress(step))

    def lr(self, step: int) -> float:
        """Learning rate of a training step."""
        return self.optimizer.peak_lr * self.schedule.factor(step)


class Critic(TrainedModel):
    """The value model. With devices of its own (`placement.critic`) it is sharded over those of all data ranks."""

    def __init__(self, model: ValueModel, config: Config, group: Group, schedule: Schedule) -> None:
        apart = critic_layout(config) is not None
        super().__init__(
            model,
            config.critic,
            group,
            schedule,
            packed=config.train.sequence_packing,
            takes_blocks=model.takes_blocks,
            device=group.other_device(2 if reference_layout(config) else 1) if apart else None,
            dispatcher=config.policy.moe_token_dispatcher,
        )
        if apart:
            log.info("critic: on %s", self._layout.device)

    @torch.no_grad()
    def values(
        self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]]
    ) -> dict[int, Tensor]:
        """By row, what is expected of each learned token of each sample, on the CPU. A collective; see `score`."""
        found: dict[int, Tensor] = {}
        for rows in batches:
            batch = collate([samples[row] for row in rows], rows, self._layout)
            sizes = [samples[row].learned_tokens for row in rows]
            with self.without_dropout():
                values = self.forward(batch)
            found.update(zip(rows, values.cpu().split(sizes), strict=True))
        return found

    def forward(self, batch: MicroBatch, **asked: Any) -> Tensor:
        """The value of what stands before each of the batch's K labels, with gradient."""
        with span("critic forward"), self._here():
            values: Tensor = self.model(batch)
        return values

    def backward(self, loss: Tensor) -> None:
        with self._here():
            super().backward(loss)

    def step(self, step: int) -> float:
        with self._here():
            return super().step(step)

    def _here(self) -> AbstractContextManager[None]:
        return torch.accelerator.device_index(self._layout.device.index)


class Ema:
    """A moving average of the weights that are trained: a ← decay · a + (1 − decay) · w after each optimizer step.

    In float32 whatever the type of the weights: with a decay near 1 a bfloat16 average would never move. It is
    sharded as they are, and begins as they begin. average: by the parameter's name in the model, those that train.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.average: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Begin anew with the weights as they are now."""
        self.average = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take one step towards the present weights. Nothing is communicated."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                local_of(self.average[name]).lerp_(local_of(parameter).float(), 1 - self._decay)


class EarlierPolicy:
    """The policy as it was, as a reference model where only a part of it trains: that part is kept, and takes the
    place of the present weights while it is called.

    It takes the memory of the weights that train, and is exact whatever these are: adapters, modules that are trained
    whole, adapters that began with a part of the base. kept: by the parameter's name in the model.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model, self.takes_blocks = model, model.takes_blocks
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._present = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kept: dict[str, Tensor] = {}
        self.keep()

    def keep(self) -> None:
        """From now on it is the policy as it is."""
        self.kept = {name: parameter.detach().clone() for name, parameter in self._present.items()}

    def __call__(self, *arguments: Any) -> TokenOutputs:
        """As `PolicyModel.forward`, without gradient."""
        with self._in_place():
            outputs: TokenOutputs = self._model(*arguments)
        return outputs

    def whole_head(self) -> Head:
        """As `PolicyModel.whole_head`."""
        with self._in_place():
            head = self._model.whole_head()
            return head._replace(weight=head.weight.clone()) if self._model.trains_head else head

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._present.items():
            now, other = local_of(parameter), local_of(self.kept[name])
            before = now.clone()
            now.copy_(other)
            other.copy_(before)
        for module in self._sharded:
            module.reshard()  # what was gathered is of other weights


class Trainer(TrainedModel):
    """See the module's docstring. reference: the frozen model of the KL terms, in the type it computes in; unused
    where it is within the policy (`schema.config.layout.reference_is_within`)."""

    def __init__(
        self,
        model: PolicyModel,
        config: Config,
        group: Group,
        schedule: Schedule,
        reference: PolicyModel | None = None,
        critic: Critic | None = None,
        teachers: Mapping[str, PolicyModel] = MappingProxyType({}),
    ) -> None:
        if group.sizes.ep > 1 and not expert_layers(model.lm):
            raise SettingsError(
                f"policy.parallelism.ep_size = {group.sizes.ep}: {type(model.lm).__name__} names no layers "
                f"of experts that ranks could share: write policy.parallelism.ep_size = 1"
            )
        models = (model, reference, None if critic is None else critic.model, *teachers.values())
        super().__init__(
            model,
            config.train,
            group,
            schedule,
            packed=config.train.sequence_packing,
            takes_blocks=all(one.takes_blocks for one in models if one is not None),
            reshaping=Reshaping.of_config(config),
            dispatcher=config.policy.moe_token_dispatcher,
        )
        self.critic, self.vocabulary = critic, self._layout.vocabulary
        self._reference_is_apart = reference_layout(config) is not None
        self._reference_layout = replace(
            self._layout, device=group.other_device(1) if self._reference_is_apart else group.device
        )
        self.reference: PolicyModel | EarlierPolicy | None
        if reference_is_within(config):
            self.reference = EarlierPolicy(model)
        else:
            self.reference = None if reference is None else self._frozen(reference, config)
        offloads = {one.name: one.offload for one in config.local_teachers}
        self.teachers = {name: self._spread(one, config, offloads[name]) for name, one in teachers.items()}
        """Frozen models of `[[teacher]]`, by name."""
        grpo = config.grpo if config.is_grpo else None
        self.reset_interval = (
            (grpo.reference_reset_interval or 0) if grpo and self.reference is not None else 0
        )
        """Steps between two resets of the reference model; 0: it stays."""
        self.adapts_kl = grpo is not None and grpo.kl_in_reward.controller == "adaptive"
        self.kl_coefficient = grpo.kl_in_reward.beta if grpo else 0.0
        """β of the KL in the reward, as it is now."""
        if self.reset_interval and isinstance(self.reference, PolicyModel):
            self._check_alike(self.reference)
        decay = config.train.ema_decay
        self.ema = None if decay is None else Ema(self.model, decay)

    def _frozen(self, model: PolicyModel, config: Config) -> PolicyModel:
        if self._reference_is_apart:
            log.info("reference model: on %s, whole", self._reference_layout.device)
            return model.requires_grad_(False).eval().to(self._reference_layout.device)
        return self._spread(model, config, config.reference.offload)

    def _spread(self, model: PolicyModel, config: Config, offload: bool) -> PolicyModel:
        """A frozen model on the policy's devices, sharded like it."""
        model.requires_grad_(False).eval()
        dispatcher = config.policy.moe_token_dispatcher
        return distribute(
            model, self.group, config.train, frozen=True, offload=offload, dispatcher=dispatcher
        )

    def _check_alike(self, reference: PolicyModel) -> None:
        mine, theirs = ({name: p.shape for name, p in m.named_parameters()} for m in (self.model, reference))
        if mine != theirs:
            raise SettingsError(
                f"train.train_policy.reference_reset_interval = {self.reset_interval} makes the reference model a "
                f"copy of the policy, and reference.model_name_or_path has other shapes: leave one of them out"
            )

    @torch.no_grad()
    def reference_head(self) -> Head:
        """The reference model's output head, whole. A collective if it is sharded."""
        assert self.reference is not None
        return self.reference.whole_head().to(self.group.device)

    @torch.no_grad()
    def reset_reference(self, optimizer: bool) -> None:
        """The reference model becomes a copy of the present one; optimizer: whose state is forgotten too.

        A collective if it has devices of its own.
        """
        assert self.reference is not None
        if isinstance(self.reference, EarlierPolicy):
            self.reference.keep()
        else:
            part = whole if self._reference_is_apart else local_of
            for new, old in zip(self.model.parameters(), self.reference.parameters(), strict=True):
                part(old).copy_(part(new))
        if optimizer:
            self.optimizer.forget()

    @torch.no_grad()
    def score(
        self,
        model: PolicyModel | EarlierPolicy,
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
        temperature: float = 1.0,
        fields: Sequence[str] = ("logprobs",),
        columns: Columns = MappingProxyType({}),
        head: Head | None = None,
        more: More | None = None,
    ) -> list[dict[int, Tensor]]:
        """For each of these `TokenOutputs`: by row, of the learned tokens of each sample, on the CPU. A collective.

        batches: the rows of each micro-batch, equally many on each rank. fields: dotted where they are parts of
        `more`. columns, head, more: see `forward`.
        """
        found: list[dict[int, Tensor]] = [{} for _ in fields]
        layout = self._reference_layout if model is self.reference else self._layout
        for rows in batches:
            batch = collate([samples[row] for row in rows], rows, layout, columns)
            with torch.accelerator.device_index(layout.device.index), self.without_dropout():
                outputs = model(batch, temperature, beside(batch, head), "hidden" in fields, more)
            sizes = [samples[row].learned_tokens for row in rows]
            for field, of_rows in zip(fields, found, strict=True):
                of_rows.update(zip(rows, attrgetter(field)(outputs).cpu().split(sizes), strict=True))
        return found

    def step(self, step: int) -> float:
        norm = super().step(step)
        if self.ema is not None:
            self.ema.update()
        return norm

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        head: Head | None = None,
        more_of: MoreOf = lambda _: None,
    ) -> TokenOutputs:
        """Log-probs and entropy of the batch's K labels, with gradient.

        head: that of the reference model; then also the KL to it, of the states in column `HIDDEN`.
        """
        with span("forward"):
            outputs: TokenOutputs = self.model(batch, temperature, beside(batch, head), more=more_of(batch))
        return outputs
