"""Frozen models next to the policy: reference, teachers, and the policy as it was; and where they are computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from policy_worker.errors import SettingsError
from policy_worker.memory.offload import local_of
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.model import PolicyModel
from policy_worker.model.stages import Stages
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.fsdp import Units, whole
from policy_worker.parallel.pipeline import Pipeline
from policy_worker.parallel.pipeline_schedule import Pipe
from policy_worker.trained.model_mesh import ModelMesh, arranged, check_experts
from schema.config import Config
from schema.config.layout import mesh_of, reference_layout

log = logging.getLogger(__name__)


class EarlierPolicy:
    """The policy as it was, as a reference model where only a part of it trains: that part is kept, and takes the
    place of the present weights while it is called.

    It takes the memory of the weights that train, and is exact whatever these are: adapters, modules that are trained
    whole, adapters that began with a part of the base. kept: by the parameter's name in the model."""

    def __init__(self, model: PolicyModel) -> None:
        self._model, self.takes_blocks = model, model.takes_blocks
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._present = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kept: dict[str, Tensor] = {}
        self.keep()

    @property
    def stages(self) -> Stages | None:
        """The stages of the policy; see `Backbone.stages`."""
        return self._model.stages

    def keep(self) -> None:
        """From now on it is the policy as it is."""
        self.kept = {name: parameter.detach().clone() for name, parameter in self._present.items()}

    def __call__(self, *arguments: Any) -> TokenOutputs:
        """See `PolicyModel.forward`; without gradient."""
        with self._in_place():
            outputs: TokenOutputs = self._model(*arguments)
        return outputs

    def whole_head(self) -> Head:
        """See `PolicyModel.whole_head`."""
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


def reference_mesh(config: Config, policy: ModelMesh) -> ModelMesh:
    """Return where the reference model is computed: as the policy, or on devices or with a mesh of its own.

    policy: where the policy is computed. A collective."""
    if reference_layout(config) is not None:
        return policy._replace(layout=replace(policy.layout, device=policy.group.other_device(1)))
    parallelism = mesh_of(config, "reference")
    if not config.has_reference or parallelism is config.policy.parallelism:
        return policy
    group = arranged(config, "reference", policy.group)
    sizes = group.sizes
    layout = replace(policy.layout, pieces=sizes.cp, piece=sizes.piece(group.rank), parts=sizes.parts)
    pipeline = Pipeline(group, Pipe.of_config(parallelism)) if parallelism.pp_size > 1 else None
    return policy._replace(group=group, layout=layout, pipeline=pipeline)


def frozen_reference(model: PolicyModel, config: Config, policy: ModelMesh, mesh: ModelMesh) -> PolicyModel:
    """Put the reference model where it is computed: whole on devices of its own, else cut and sharded. A collective.

    policy, mesh: where the policy and the reference are computed. Raises `SettingsError`: it cannot be cut so."""
    if reference_layout(config) is not None:
        log.info("reference model: on %s, whole", mesh.layout.device)
        return model.requires_grad_(False).eval().read_weights(mesh.layout.device).to(mesh.layout.device)
    if mesh.group is not policy.group:
        check_experts(model, mesh.group, "reference.parallelism")
    units = Units.of_config(config.reference)
    units.check(model, "reference")
    return spread(model, config, config.reference.offload, mesh, units)


def spread(
    model: PolicyModel, config: Config, offload: bool, mesh: ModelMesh, units: Units | None = None
) -> PolicyModel:
    """Freeze a model, and cut and shard it over `mesh`. A collective.

    offload: its weights are in host memory between its passes. units: see `fsdp.Units`; None: the decoder layers."""
    model.requires_grad_(False).eval()
    if mesh.pipeline is not None:
        mesh.pipeline.cut(model)
    dispatcher = config.policy.dispatcher
    return distribute(
        model, mesh.group, config.train, frozen=True, offload=offload, dispatcher=dispatcher, units=units
    )


def check_alike(policy: PolicyModel, reference: PolicyModel, interval: int) -> None:
    """Raises `SettingsError`: the policy's weights cannot become those of the reference model every so many steps."""
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (policy, reference)]
    if shapes[0] != shapes[1]:
        raise SettingsError(
            f"train.train_policy.reference_reset_interval = {interval} makes the reference model a copy of the "
            f"policy, and reference.model_name_or_path has other shapes: leave one of them out"
        )


def copy_weights(policy: PolicyModel, reference: PolicyModel) -> None:
    """Give a reference model the policy's weights. A collective where it is whole on devices of its own."""
    for new, old in zip(policy.parameters(), reference.parameters(), strict=True):
        part = local_of if isinstance(old, DTensor) else whole
        part(old).copy_(part(new))
