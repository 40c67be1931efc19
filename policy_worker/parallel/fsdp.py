"""Fully sharded data parallelism (FSDP2): each decoder layer, or module that is chosen, is a unit, then the rest.

Every rank holds 1/(dp_shard · cp) of each parameter and of its optimizer state; a layer is gathered for its forward
and again for its backward, and gradients are averaged while they are scattered, then over the copies (dp_replicate).
The loss is therefore multiplied by the number of ranks (see `trainer`), which makes the average the sum that the
formulas ask for. Ranks that have a piece of the same sequences each (cp) have a part of their gradient each.

One rank whose parameters are used where and in the type they are stored in has nothing to shard, move or cast, and
is left alone: the hooks and copies of FSDP2 cost 7 to 13 % of a step of a small model there (measured, 0.3M
parameters, CPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from policy_worker.errors import SettingsError
from policy_worker.model.lora import adapted
from policy_worker.model.model import DTYPES, AnyModel, Backbone
from policy_worker.parallel.mesh import EP, sharding_mesh
from schema.config.sections.optimizer import PrecisionKeys
from schema.config.sections.reference import ReferenceConfig


def needs_sharding(ranks: int, keys: PrecisionKeys) -> bool:
    """Whether there is anything for FSDP2 to do. ranks: `ParallelDims.fsdp_ranks`."""
    return ranks > 1 or keys.param_dtype != keys.master_dtype or keys.fsdp_offload


class Units(NamedTuple):
    """Which modules are sharded one by one, the rest of the model as one. layers: their class names; none: the
    model's decoder layers. least: instead, modules whose parameters, less those of units within, are so many."""

    layers: Sequence[str] = ()
    least: int = 0

    @staticmethod
    def of_config(keys: PrecisionKeys | ReferenceConfig) -> Units:
        """Read the units of a section."""
        return Units(keys.fsdp_wrap_layers, keys.fsdp_wrap_min_params)

    def of_model(self, model: Backbone) -> list[nn.Module]:
        """List the units of a model, inner ones first."""
        if self.least:
            return _of_size(model, self.least)
        if not self.layers:
            return model.decoder_layers()
        return [m for m in _eligible(model) if _kind(m) in self.layers]

    def check(self, model: Backbone, section: str) -> None:
        """Raises `SettingsError`: a name is not that of a class of the whole model whose modules can be units."""
        known = dict.fromkeys(_kind(m) for m in _eligible(model))
        for name in self.layers:
            if name not in known:
                raise SettingsError(
                    f"{section}.fsdp_wrap_layers: {type(model.lm).__name__} has no modules of class {name!r} that "
                    f"can be sharded by themselves; it has {', '.join(sorted(known))}"
                )


def _kind(module: nn.Module) -> str:
    """The class as the model has it, before it is sharded or computes in fp8."""
    return type(module).__name__.removeprefix("FSDP").removeprefix("Float8")


def _eligible(model: Backbone) -> Iterator[nn.Module]:
    """Modules within the model that can be units, inner ones first: called as modules, with all that is tied.

    The output head is not, since log-probs are computed from its weight, nor what is within an adapted layer: an
    adapter may use its weight."""
    head, adapted_layers = model.lm.get_output_embeddings(), [m for m in model.modules() if adapted(m)]
    within = {inner for layer in adapted_layers for inner in layer.modules() if inner is not layer}
    users: dict[nn.Parameter, int] = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    for module in dict.fromkeys(_inner_first(model)):
        parameters = [p for m in module.modules() for p in m.parameters(recurse=False)]
        calls_head = head is not None and any(m is head for m in module.modules())
        is_called = type(module).forward is not nn.Module.forward
        alone = all(users[p] == n for p, n in Counter(parameters).items())
        if parameters and alone and is_called and not calls_head and module not in within:
            yield module


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
        yield child


def _of_size(model: Backbone, least: int) -> list[nn.Module]:
    units: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in _eligible(model):
        rest = {p for p in module.parameters() if p not in taken}
        if sum(p.numel() for p in rest) >= least:
            units.append(module)
            taken |= rest
    return units


def apply_fsdp(
    model: AnyModel,
    mesh: DeviceMesh,
    keys: PrecisionKeys,
    *,
    frozen: bool = False,
    offload: bool = False,
    units: Units = Units(),  # noqa: B008
) -> AnyModel:
    """Shard `model` in place over the mesh's dimensions of data and sequence, and move it to the mesh's device, or
    read it there.

    frozen: nothing of it trains, so it is gathered for its forward alone. offload: weights are in host memory, and so
    gradients and optimizer of what trains; each unit comes to the device for its own forward and backward."""
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[keys.param_dtype], reduce_dtype=DTYPES[keys.fsdp_reduce_dtype]
    )
    # The root is used last in forward and first in backward: only "always" frees it in between.
    units_reshard = frozen or keys.fsdp_reshard_after_forward != "never"
    root_reshard = frozen or keys.fsdp_reshard_after_forward == "always"
    shards, chosen = sharding_mesh(mesh), set(units.of_model(model))
    policies = {"mp_policy": precision, "offload_policy": place}
    for module in dict.fromkeys(_inner_first(model)):
        if _has_experts(module):
            of_experts = sharding_mesh(mesh, experts=True)
            fully_shard(module, mesh=of_experts, reshard_after_forward=units_reshard, **policies)
        elif module in chosen:
            fully_shard(module, mesh=shards, reshard_after_forward=units_reshard, **policies)
    fully_shard(model, mesh=shards, reshard_after_forward=root_reshard, **policies)
    if model.stages is not None:
        model.stages.dtype = DTYPES[keys.param_dtype]
    model.reduces_late = not keys.overlap_grad_reduce
    model.reduces_each = keys.fsdp_accumulation == "sharded"
    model.read_weights(torch.device("cpu" if offload else mesh.device_type))
    for buffer in model.buffers():  # which FSDP2 leaves to the model
        buffer.data = buffer.data.to(mesh.device_type)
    return model


def _has_experts(layer: nn.Module) -> bool:
    """Whether it is a layer of experts that are spread over ranks with other tokens."""
    parameters = layer.parameters(recurse=False)
    return any(isinstance(p, DTensor) and EP in (p.device_mesh.mesh_dim_names or ()) for p in parameters)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter on every rank. A collective if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def set_last_micro_batch(model: Backbone, last: bool) -> None:
    """Say of which micro-batch of an optimizer step the next backward is.

    Gradients are reduced in the backward of each, or of the last one; or after that, by `reduce_gradients`. Copies
    of shards are added up with the last one; of the stages of a pipeline with each, since the last backward of a
    stage may be an earlier one than that of the rank."""
    if isinstance(model, FSDPModule):
        sharded = cast(FSDPModule, model)
        reduces = last or model.reduces_each
        sharded.set_requires_gradient_sync(reduces and not model.reduces_late)
        sharded.set_requires_all_reduce((last or model.stages is not None) and not model.reduces_late)
        # Stages of a pipeline have other micro-batches on their way, whose order of layers is kept till the last one.
        sharded.set_is_last_backward(last or (model.reduces_each and model.stages is None))


def reduce_gradients(model: Backbone, last: bool = True) -> None:
    """Reduce the gradients of the micro-batches so far, where their backwards have left that. A collective.

    last: whether those of the optimizer step are complete; before, only where each micro-batch's are reduced.

    FSDP2 has no call for it but what its backward ends with, which torch's own pipelines call as well
    (`torch.distributed.pipelining.stage`): it reduces each unit that has not been."""
    if isinstance(model, FSDPModule) and model.reduces_late and (last or model.reduces_each):
        sharded = cast(FSDPModule, model)
        sharded.set_requires_gradient_sync(True)
        sharded.set_requires_all_reduce(last or model.stages is not None)
        fully_shard.state(model)._root_post_backward_final_callback()
