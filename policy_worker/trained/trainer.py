"""The policy of this rank as a model that learns, with the models next to it: reference, teachers, critic, average.

score: forward, of the policy or of a frozen model     log-probs before training
learn, apply: see `policy_worker.trained.model`
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from policy_worker.errors import SettingsError
from policy_worker.memory.offload import local_of
from policy_worker.model.logits.drawn import Reshaping
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.micro_batch import Columns, MicroBatch, Segment, TrainSample
from policy_worker.model.model import Backbone, More, PolicyModel
from policy_worker.model.stages import StageInput
from policy_worker.parallel.experts import expert_layers
from policy_worker.parallel.kernels import use_liger
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.trained.critic import Critic
from policy_worker.trained.frozen import (
    EarlierPolicy,
    check_alike,
    copy_weights,
    frozen_reference,
    reference_mesh,
    spread,
)
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import MoreOf, TrainedModel
from policy_worker.trained.model_mesh import NUMBERS, ModelMesh, check_experts, reference_distributions
from schema.config import Config
from schema.config.layout import reference_is_within

log = logging.getLogger(__name__)


class Trainer(TrainedModel):
    """See the module's docstring. reference: the frozen model of the KL terms, in the type it computes in; unused
    where it is within the policy (`schema.config.layout.reference_is_within`)."""

    def __init__(
        self,
        model: PolicyModel,
        config: Config,
        group: RankGroup,
        schedule: Schedule,
        reference: PolicyModel | None = None,
        critic: Critic | None = None,
        teachers: Mapping[str, PolicyModel] = MappingProxyType({}),
    ) -> None:
        check_experts(model, group, "policy.parallelism")
        if config.policy.moe_shared_expert_overlap and not any(shared for _, shared in expert_layers(model.lm)):
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
            parallelism=config.policy.parallelism,
            packed=config.train.sequence_packing,
            takes_blocks=all(each.takes_blocks for each in models if each is not None)
            and (model.routing_replay is None or config.rollout.computes_prompts_once),
            reshaping=Reshaping.of_config(config),
            dispatcher=config.policy.dispatcher,
        )
        self.critic, self.vocabulary = critic, self.mesh.layout.vocabulary
        self.reference_mesh = reference_mesh(config, self.mesh)
        self.reference: PolicyModel | EarlierPolicy | None
        if reference_is_within(config):
            self.reference = EarlierPolicy(model)
        else:
            self.reference = reference and frozen_reference(reference, config, self.mesh, self.reference_mesh)
        offloads = {teacher.name: teacher.offload for teacher in config.local_teachers}
        self.teachers = {
            name: spread(teacher, config, offloads[name], self.mesh) for name, teacher in teachers.items()
        }
        """Frozen models of `[[teacher]]`, by name."""
        grpo = config.grpo if config.is_grpo else None
        self.reset_interval = (grpo.reference_reset_interval or 0) if grpo and self.reference is not None else 0
        """Steps between two resets of the reference model; 0: it stays."""
        self.adapts_kl = grpo is not None and grpo.kl_in_reward.controller == "adaptive"
        self.kl_coefficient = grpo.kl_in_reward.beta if grpo else 0.0
        """β of the KL in the reward, as it is now."""
        if self.reset_interval and isinstance(self.reference, PolicyModel):
            check_alike(self.model, self.reference, self.reset_interval)
        if config.policy.enable_liger_kernel:
            self._use_liger()
        decay = config.train.ema_decay
        self.ema = None if decay is None else Ema(self.model, decay)

    def resident(self) -> Iterator[Tensor]:
        """All that this rank keeps on its devices between two steps."""
        frozen = [self.reference] if isinstance(self.reference, PolicyModel) else []
        trained: list[TrainedModel] = [self] if self.critic is None else [self, self.critic]
        for model in (*(model_trained.model for model_trained in trained), *frozen, *self.teachers.values()):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            yield from model.buffers()
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for model_trained in trained:
            for optimizer in model_trained.optimizer.optimizers:
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))
        if isinstance(self.reference, EarlierPolicy):
            yield from self.reference.kept.values()
        if self.ema is not None:
            yield from self.ema.average.values()

    def _use_liger(self) -> None:
        """Let all models on the devices of the ranks use its kernels. A collective. Raises as `use_liger`."""
        models: list[tuple[Backbone, ModelMesh]] = [(self.model, self.mesh)]
        models += [(teacher, self.mesh) for teacher in self.teachers.values()]
        if self.critic is not None:
            models.append((self.critic.model, self.critic.mesh))
        if isinstance(self.reference, PolicyModel):
            models.append((self.reference, self.reference_mesh))
        ids = np.arange(1, 17, dtype=np.int32) % self.vocabulary
        probe = TrainSample([Segment(ids, np.ones(len(ids), np.uint8), None)])
        for model, mesh in models:
            (batch,) = mesh.laid_out({0: probe}, [[0]], {})

            def compute(model: Backbone = model, batch: MicroBatch = batch) -> Tensor:
                with self.without_dropout(), torch.accelerator.device_index(batch.input_ids.device.index):
                    outputs = model(batch)
                return cast(Tensor, outputs if isinstance(outputs, Tensor) else outputs.logprobs)

            use_liger(model, compute)

    def mesh_of(self, model: PolicyModel | EarlierPolicy) -> ModelMesh:
        """Where the policy, or a frozen model next to it, is computed: these choose experts for themselves."""
        if model is self.model:
            return self.mesh
        mesh = self.reference_mesh if model is self.reference else self.mesh
        return mesh._replace(layout=replace(mesh.layout, mixtures=None))

    @torch.no_grad()
    def head_of(self, model: PolicyModel) -> Head | None:
        """A frozen model's output head, whole; None where outputs are elsewhere. A collective if it is sharded."""
        return model.whole_head().to(self.group.device) if self.mesh.has_outputs else None

    @torch.no_grad()
    def reset_reference(self, optimizer: bool) -> None:
        """The reference model becomes a copy of the present one; optimizer: whose state is forgotten too.

        A collective if it has devices of its own."""
        assert self.reference is not None
        if isinstance(self.reference, EarlierPolicy):
            self.reference.keep()
        else:
            copy_weights(self.model, self.reference)
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
        `forward`."""
        by_field: list[dict[int, Tensor]] = [{} for _ in fields]
        mesh = self.mesh_of(model)

        def compute(batch: MicroBatch, entry: StageInput | None = None) -> Any:
            with torch.accelerator.device_index(mesh.layout.device.index):
                return model(
                    batch, temperature, reference_distributions(batch, head), "hidden" in fields, more, entry
                )

        def keep(batch: MicroBatch, outputs: TokenOutputs) -> None:
            sizes = [samples[row].learned_tokens for row in batch.rows]
            for field, of_rows in zip(fields, by_field, strict=True):
                of_rows.update(zip(batch.rows, attrgetter(field)(outputs).cpu().split(sizes), strict=True))

        with self.without_dropout():
            mesh.score(model.stages, mesh.laid_out(samples, batches, columns), compute, keep)
        return [
            mesh.in_unit(of_rows, samples, batches) if field in NUMBERS else of_rows
            for field, of_rows in zip(fields, by_field, strict=True)
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
        entry: StageInput | None = None,
    ) -> TokenOutputs:
        """Log-probs and entropy of the batch's K labels, with gradient.

        head: that of the reference model; then also the KL to it, of the states in column `HIDDEN`."""
        with span("forward"):
            outputs: TokenOutputs = self.model(
                batch, temperature, reference_distributions(batch, head), more=more_of(batch), entry=entry
            )
        return outputs


class Ema:
    """A moving average of the weights that are trained: a ← decay · a + (1 − decay) · w after each optimizer step.

    In float32 whatever the type of the weights: with a decay near 1 a bfloat16 average would never move. It is
    sharded as they are, and begins as they begin. average: by the parameter's name in the model, those that train."""

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
