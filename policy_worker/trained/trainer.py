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
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from policy_worker.errors import SettingsError
from policy_worker.memory.offload import Gradients
from policy_worker.model.drawn import Reshaping
from policy_worker.model.logprobs import Beside, Head, TokenOutputs
from policy_worker.model.lr_schedule import Schedule
from policy_worker.model.micro_batch import (
    LEAST_SPARED,
    Columns,
    Layout,
    MicroBatch,
    Segment,
    TrainSample,
    collate,
)
from policy_worker.model.model import DTYPES, Backbone, More, PolicyModel, ValueModel
from policy_worker.model.optim import Optimizer
from policy_worker.model.routing import Replay
from policy_worker.model.stages import Entry, Stages
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.experts import expert_layers
from policy_worker.parallel.fsdp import Units, local_of, reduce_gradients, set_last_micro_batch, whole
from policy_worker.parallel.group import Group
from policy_worker.parallel.kernels import use_liger
from policy_worker.parallel.loss_scale import LossScaler, scaled_by
from policy_worker.parallel.mesh import MeshSizes
from policy_worker.parallel.parts import finish_gradients
from policy_worker.parallel.pipeline import Pipeline, copies_in
from policy_worker.parallel.pipeline_schedule import Pipe
from policy_worker.ranges import span
from schema.config import Config, CriticConfig, TrainingConfig
from schema.config.layout import critic_layout, mesh_of, reference_is_within, reference_layout
from schema.config.sections.optimizer import PrecisionKeys
from schema.config.sections.policy import ParallelismConfig
from weight_sync.hf_names import Gather

log = logging.getLogger(__name__)

HIDDEN = "hidden"
"""The column with the reference model's hidden states, [n_i, D] of each sample."""
NUMBERS = ("logprobs", "entropy", "correct", "kl")
"""Of `TokenOutputs`: one number for each token."""
LossOf = Callable[[MicroBatch, Any], Tensor]
"""(a micro-batch, what `forward` computes of it) → its part of an optimizer step's loss."""
MoreOf = Callable[[MicroBatch], More | None]
"""(a micro-batch) → what its forward computes besides; see `PolicyModel.forward`."""


def beside(batch: MicroBatch, head: Head | None) -> Beside | None:
    """The reference model's distributions at this rank's tokens of a batch, if its output head is given."""
    return None if head is None else Beside(batch.of_piece(batch.columns[HIDDEN]), head)


class Place(NamedTuple):
    """Where a model is computed. All its ranks call alike.

    group: the ranks, with the coordinates that they have for it. layout: of its micro-batches on this rank. pipeline:
    of its stages; None: all ranks have all of it. numbers: the type of what it says of a token.
    """

    group: Group
    layout: Layout
    numbers: torch.dtype
    pipeline: Pipeline | None = None

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage of the model, or all of it."""
        return self.pipeline is None or self.pipeline.is_last

    def laid_out(
        self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]], columns: Columns
    ) -> Iterator[MicroBatch]:
        """Micro-batches; columns are where outputs are."""
        for rows in batches:
            yield collate(
                [samples[row] for row in rows], rows, self.layout, columns if self.has_outputs else {}
            )

    def score(
        self,
        model: Backbone,
        batches: Iterable[MicroBatch],
        compute: Callable[..., Any],
        keep: Callable[[MicroBatch, Any], None],
    ) -> None:
        """Forwards alone: hand what `compute` finds of each micro-batch to `keep`, where outputs are."""
        if self.pipeline is not None:
            self.pipeline.score(model, batches, compute, keep)
        else:
            for batch in batches:
                keep(batch, compute(batch))

    def in_unit(
        self,
        found: Mapping[int, Tensor],
        samples: Mapping[int, TrainSample],
        batches: Sequence[Sequence[int]],
    ) -> dict[int, Tensor]:
        """By row a number for each learned token, where the last stage is, on all ranks of its unit."""
        rows = list(dict.fromkeys(row for rows in batches for row in rows))
        if self.pipeline is None or not rows:
            return dict(found)
        mine = [torch.cat([found[row] for row in rows])] if self.group.counts else []
        (numbers,) = self.group.tensors_from_last_stage(mine)
        return dict(zip(rows, numbers.split([samples[row].learned_tokens for row in rows]), strict=True))

    def to_all_ranks(self, found: Mapping[int, Tensor], lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """By row a number for each learned token, on ranks that have another model's share too. lengths: how many
        tokens each row has, of all rows of the pass."""
        return self.group.to_all_ranks(found, lengths, self.numbers)


def arranged(config: Config, role: str, group: Group) -> Group:
    """The ranks as they stand for the reference model or the critic. A collective.

    Raises:
        SettingsError: its sizes are of another number of ranks.
    """
    if mesh_of(config, role) is config.policy.parallelism:
        return group
    section = f"{role}.parallelism"
    return group.arranged(MeshSizes.of_config(mesh_of(config, role), group.world, section))


def check_experts(model: Backbone, group: Group, section: str) -> None:
    """Raises `SettingsError`: ranks are to share experts, and the model has none."""
    if group.sizes.ep > 1 and not expert_layers(model.lm):
        raise SettingsError(
            f"{section}.ep_size = {group.sizes.ep}: {type(model.lm).__name__} names no layers of experts that ranks "
            f"could share: write {section}.ep_size = 1"
        )


def numbers_of(keys: PrecisionKeys) -> torch.dtype:
    """The type of log-probs and values of a model that computes as these keys say."""
    return torch.promote_types(DTYPES[keys.param_dtype], DTYPES["float32"])


class TrainedModel(ABC):
    """A model that learns, on this rank: sharded, with optimizer and schedule.

    group: the ranks as they stand for it. mesh: its own. takes_blocks: whether every model that the layout serves
    does. device: where it is; None: that of the rank. reshaping: what its log-probs are of. dispatcher: see
    `policy_worker.parallel.experts`.
    """

    def __init__(
        self,
        model: Backbone,
        keys: TrainingConfig | CriticConfig,
        group: Group,
        schedule: Schedule,
        *,
        mesh: ParallelismConfig,
        packed: bool,
        takes_blocks: bool,
        device: torch.device | None = None,
        reshaping: Reshaping = Reshaping(),  # noqa: B008
        dispatcher: str = "alltoall",
    ) -> None:
        self.group, self.schedule = group, schedule
        own, device = device is not None, device or group.device
        self.least_spared = LEAST_SPARED.get(device.type) if takes_blocks else None
        """Part of a step's tokens from which on samples share their prompts; None: never."""
        sizes = group.sizes
        spared, piece = self.least_spared, sizes.piece(group.rank)
        mixtures = None if model.replay is None else model.replay.mixtures
        layout = Layout(
            packed, model.vocabulary, device, spared, reshaping, sizes.cp, piece, sizes.parts, mixtures
        )
        section = "critic" if isinstance(keys, CriticConfig) else "train"
        Units.of_config(keys).check(model, section)
        self._pipeline = Pipeline(group, Pipe.of_config(mesh)) if sizes.pp > 1 else None
        self.place = Place(group, layout, numbers_of(keys), self._pipeline)
        if self._pipeline is not None:
            self._pipeline.cut(model)
        with torch.accelerator.device_index(device.index):
            self.model = distribute(model, group, keys, device if own else None, dispatcher=dispatcher)
            self.optimizer = Optimizer.of_model(self.model, keys, section)
        offloads = keys.fsdp_gradient_offload and not keys.fsdp_offload  # by which FSDP2 has them on the host
        self._gradients = Gradients(self.optimizer.parameters) if offloads else None
        narrow = scaled_by(keys)
        self.scaler = LossScaler(group, f"{section}.{narrow}") if narrow else None
        """Of losses, where gradients would vanish in float16."""
        if self.scaler is not None:
            self.optimizer.skips = self.scaler.skips
        self._dropouts = [m for m in self.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
        if self._pipeline is not None:
            self.optimizer.copies = copies_in(self.model)
            self.optimizer.total_norm = self._pipeline.total_norm

    @property
    def replay(self) -> Replay | None:
        """Of the experts that the engine chose; None: the model chooses."""
        return self.model.replay

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank trains on."""
        return self.group.data_rank

    @property
    def has_outputs(self) -> bool:
        """See `Place.has_outputs`."""
        return self.place.has_outputs

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
            yield collate([samples[row] for row in rows], rows, self.place.layout, columns)

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
        further arguments of `forward`. Only where the last stage of a pipeline is there are outputs, and losses.
        """
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

        laid_out = self.place.laid_out(samples, batches, columns)
        self._pipeline.learn(self.model, laid_out, partial(self.forward, **asked), loss_share)

    @abstractmethod
    def forward(self, batch: MicroBatch, entry: Entry | None = None, **asked: Any) -> Any:
        """What the model, or one of its stages, computes of a micro-batch, with gradient."""

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
        """What dropout leaves out from here on is a matter of these numbers alone."""
        if self._dropouts:
            torch.manual_seed(int(np.random.SeedSequence(of).generate_state(1, np.uint64)[0]) >> 1)

    def apply(self, step: int) -> float:
        """One optimizer step with the gradients that there are, at the learning rate of training step `step`; the
        gradient norm before clipping, NaN where the step was skipped.

        Raises:
            NonFiniteGradientError: see `Optimizer.step`.
        """
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


class Critic(TrainedModel):
    """The value model. With devices of its own (`placement.critic`) it is sharded over those of all data ranks."""

    def __init__(self, model: ValueModel, config: Config, group: Group, schedule: Schedule) -> None:
        apart, group = critic_layout(config) is not None, arranged(config, "critic", group)
        super().__init__(
            model,
            config.critic,
            group,
            schedule,
            mesh=mesh_of(config, "critic"),
            packed=config.train.sequence_packing,
            takes_blocks=model.takes_blocks,
            device=group.other_device(2 if reference_layout(config) else 1) if apart else None,
            dispatcher=config.policy.dispatcher,
        )
        if apart:
            log.info("critic: on %s", self.place.layout.device)

    @torch.no_grad()
    def values(
        self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]]
    ) -> dict[int, Tensor]:
        """By row, what is expected of each learned token of each sample, on the CPU. A collective; see `score`."""
        found: dict[int, Tensor] = {}

        def keep(batch: MicroBatch, values: Tensor) -> None:
            sizes = [samples[row].learned_tokens for row in batch.rows]
            found.update(zip(batch.rows, values.cpu().split(sizes), strict=True))

        with self.without_dropout():
            laid_out = self.place.laid_out(samples, batches, {})
            self.place.score(self.model, laid_out, self.forward, keep)
        return self.place.in_unit(found, samples, batches)

    def forward(self, batch: MicroBatch, entry: Entry | None = None, **asked: Any) -> Tensor:
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
        return torch.accelerator.device_index(self.place.layout.device.index)


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
        self.average = {}  # not two of them at once
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

    @property
    def stages(self) -> Stages | None:
        """As `Backbone.stages`: those of the policy."""
        return self._model.stages

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
        check_experts(model, group, "policy.parallelism")
        if config.policy.moe_shared_expert_overlap and not any(
            shared for _, shared in expert_layers(model.lm)
        ):
            raise SettingsError(
                f"policy.moe_shared_expert_overlap = true: {type(model.lm).__name__} has no shared expert next to "
                f"others: write false"
            )
        models = (model, reference, None if critic is None else critic.model, *teachers.values())
        super().__init__(
            model,
            config.train,
            group,
            schedule,
            mesh=config.policy.parallelism,
            packed=config.train.sequence_packing,
            takes_blocks=all(one.takes_blocks for one in models if one is not None)
            and (model.replay is None or config.rollout.computes_prompts_once),
            reshaping=Reshaping.of_config(config),
            dispatcher=config.policy.dispatcher,
        )
        self.critic, self.vocabulary = critic, self.place.layout.vocabulary
        self._reference_is_apart = reference_layout(config) is not None
        self.reference_place = self.place
        if self._reference_is_apart:
            layout = replace(self.place.layout, device=group.other_device(1))
            self.reference_place = self.place._replace(layout=layout)
        elif config.has_reference and mesh_of(config, "reference") is not config.policy.parallelism:
            self.reference_place = self._own_place(config)
        self.reference: PolicyModel | EarlierPolicy | None
        if reference_is_within(config):
            self.reference = EarlierPolicy(model)
        else:
            self.reference = None if reference is None else self._frozen(reference, config)
        offloads = {one.name: one.offload for one in config.local_teachers}
        self.teachers = {
            name: self._spread(one, config, offloads[name], self.place) for name, one in teachers.items()
        }
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
        if config.policy.enable_liger_kernel:
            self._use_liger()
        decay = config.train.ema_decay
        self.ema = None if decay is None else Ema(self.model, decay)

    def resident(self) -> Iterator[Tensor]:
        """All that this rank keeps on its devices between two steps."""
        frozen = [self.reference] if isinstance(self.reference, PolicyModel) else []
        trained: list[TrainedModel] = [self] if self.critic is None else [self, self.critic]
        for model in (*(one.model for one in trained), *frozen, *self.teachers.values()):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            yield from model.buffers()
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for one in trained:
            for optimizer in one.optimizer.optimizers:
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))
        if isinstance(self.reference, EarlierPolicy):
            yield from self.reference.kept.values()
        if self.ema is not None:
            yield from self.ema.average.values()

    def _use_liger(self) -> None:
        """In all models on the devices of the ranks. A collective. Raises `SettingsError`, see `use_liger`."""
        models: list[tuple[Backbone, Place]] = [(self.model, self.place)]
        models += [(teacher, self.place) for teacher in self.teachers.values()]
        if self.critic is not None:
            models.append((self.critic.model, self.critic.place))
        if isinstance(self.reference, PolicyModel):
            models.append((self.reference, self.reference_place))
        ids = np.arange(1, 17, dtype=np.int32) % self.vocabulary
        probe = TrainSample([Segment(ids, np.ones(len(ids), np.uint8), None)])
        for model, place in models:
            (batch,) = place.laid_out({0: probe}, [[0]], {})

            def compute(model: Backbone = model, batch: MicroBatch = batch) -> Tensor:
                with self.without_dropout(), torch.accelerator.device_index(batch.input_ids.device.index):
                    found = model(batch)
                return cast(Tensor, found if isinstance(found, Tensor) else found.logprobs)

            use_liger(model, compute)

    def _frozen(self, model: PolicyModel, config: Config) -> PolicyModel:
        if self._reference_is_apart:
            device = self.reference_place.layout.device
            log.info("reference model: on %s, whole", device)
            return model.requires_grad_(False).eval().read_weights(device).to(device)
        if self.reference_place.group is not self.group:
            check_experts(model, self.reference_place.group, "reference.parallelism")
        units = Units.of_config(config.reference)
        units.check(model, "reference")
        return self._spread(model, config, config.reference.offload, self.reference_place, units)

    def _own_place(self, config: Config) -> Place:
        """That of a reference model with a mesh of its own. A collective."""
        mesh, group = mesh_of(config, "reference"), arranged(config, "reference", self.group)
        sizes = group.sizes
        layout = replace(self.place.layout, pieces=sizes.cp, piece=sizes.piece(group.rank), parts=sizes.parts)
        pipeline = Pipeline(group, Pipe.of_config(mesh)) if mesh.pp_size > 1 else None
        return self.place._replace(group=group, layout=layout, pipeline=pipeline)

    def _spread(
        self, model: PolicyModel, config: Config, offload: bool, place: Place, units: Units | None = None
    ) -> PolicyModel:
        """A frozen model on the policy's devices, cut and sharded as it is there."""
        model.requires_grad_(False).eval()
        if place.pipeline is not None:
            place.pipeline.cut(model)
        dispatcher = config.policy.dispatcher
        return distribute(
            model, place.group, config.train, frozen=True, offload=offload, dispatcher=dispatcher, units=units
        )

    def place_of(self, model: PolicyModel | EarlierPolicy) -> Place:
        """Where the policy, or a frozen model next to it, is computed: these choose experts for themselves."""
        if model is self.model:
            return self.place
        place = self.reference_place if model is self.reference else self.place
        return place._replace(layout=replace(place.layout, mixtures=None))

    def _check_alike(self, reference: PolicyModel) -> None:
        mine, theirs = ({name: p.shape for name, p in m.named_parameters()} for m in (self.model, reference))
        if mine != theirs:
            raise SettingsError(
                f"train.train_policy.reference_reset_interval = {self.reset_interval} makes the reference model a "
                f"copy of the policy, and reference.model_name_or_path has other shapes: leave one of them out"
            )

    @torch.no_grad()
    def head_of(self, model: PolicyModel) -> Head | None:
        """A frozen model's output head, whole; None where outputs are elsewhere. A collective if it is sharded."""
        return model.whole_head().to(self.group.device) if self.has_outputs else None

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
        `more`; those of several numbers a token only where the last stage of a pipeline is. columns, head, more: see
        `forward`.
        """
        found: list[dict[int, Tensor]] = [{} for _ in fields]
        place = self.place_of(model)

        def compute(batch: MicroBatch, entry: Entry | None = None) -> Any:
            with torch.accelerator.device_index(place.layout.device.index):
                return model(batch, temperature, beside(batch, head), "hidden" in fields, more, entry)

        def keep(batch: MicroBatch, outputs: TokenOutputs) -> None:
            sizes = [samples[row].learned_tokens for row in batch.rows]
            for field, of_rows in zip(fields, found, strict=True):
                of_rows.update(zip(batch.rows, attrgetter(field)(outputs).cpu().split(sizes), strict=True))

        with self.without_dropout():
            place.score(model, place.laid_out(samples, batches, columns), compute, keep)
        return [
            place.in_unit(of_rows, samples, batches) if field in NUMBERS else of_rows
            for field, of_rows in zip(fields, found, strict=True)
        ]

    def apply(self, step: int) -> float:
        norm = super().apply(step)
        if self.ema is not None and not math.isnan(norm):
            self.ema.update()
        return norm

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        head: Head | None = None,
        more_of: MoreOf = lambda _: None,
        entry: Entry | None = None,
    ) -> TokenOutputs:
        """Log-probs and entropy of the batch's K labels, with gradient.

        head: that of the reference model; then also the KL to it, of the states in column `HIDDEN`.
        """
        with span("forward"):
            outputs: TokenOutputs = self.model(
                batch, temperature, beside(batch, head), more=more_of(batch), entry=entry
            )
        return outputs
