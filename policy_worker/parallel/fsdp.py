"""Fully sharded data parallelism (FSDP2): each decoder layer is a unit, then the rest of the model.

Every rank holds 1/(dp_shard · cp) of each parameter and of its optimizer state; a layer is gathered for its forward
and again for its backward, and gradients are averaged while they are scattered, then over the copies (dp_replicate).
The loss is therefore multiplied by the number of ranks (see `trainer`), which makes the average the sum that the
formulas ask for. Ranks that have a piece of the same sequences each (cp) have a part of their gradient each.

One rank whose parameters are used in the type they are stored in has nothing to shard or cast, and is left
alone: the hooks and copies of FSDP2 cost 7 to 13 % of a step of a small model there (measured, 0.3M parameters, CPU).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from policy_worker.model.model import DTYPES, AnyModel
from policy_worker.parallel.mesh import EP, sharding_mesh
from schema.config.sections.optimizer import PrecisionKeys


def needs_sharding(ranks: int, keys: PrecisionKeys) -> bool:
    """Whether there is anything for FSDP2 to do. ranks: `MeshSizes.fsdp_ranks`."""
    return ranks > 1 or keys.param_dtype != keys.master_dtype


def apply_fsdp(
    model: AnyModel, mesh: DeviceMesh, keys: PrecisionKeys, *, frozen: bool = False, offload: bool = False
) -> AnyModel:
    """Shard `model` in place over the mesh's dimensions of data and sequence, and move it to the mesh's device, or
    read it there.

    frozen: nothing of it trains, so it is gathered for its forward alone. offload: between its forwards its weights
    are in host memory; each layer comes to the device for its own.
    """
    place = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[keys.param_dtype], reduce_dtype=DTYPES[keys.fsdp_reduce_dtype]
    )
    # The root is used last in forward and first in backward: only "always" frees it in between.
    layers_reshard = frozen or keys.fsdp_reshard_after_forward != "never"
    root_reshard = frozen or keys.fsdp_reshard_after_forward == "always"
    shards = sharding_mesh(mesh)
    how = {"mp_policy": precision, "offload_policy": place}
    for layer in model.decoder_layers():
        for part in layer.modules():
            if _has_experts(part):
                of_experts = sharding_mesh(mesh, experts=True)
                fully_shard(part, mesh=of_experts, reshard_after_forward=layers_reshard, **how)
        fully_shard(layer, mesh=shards, reshard_after_forward=layers_reshard, **how)
    fully_shard(model, mesh=shards, reshard_after_forward=root_reshard, **how)
    if model.stages is not None:
        model.stages.dtype = DTYPES[keys.param_dtype]
    return model.read_weights(torch.device("cpu" if offload else mesh.device_type))


def _has_experts(layer: nn.Module) -> bool:
    """Whether it is a layer of experts that are spread over ranks with other tokens."""
    own = layer.parameters(recurse=False)
    return any(isinstance(p, DTensor) and EP in (p.device_mesh.mesh_dim_names or ()) for p in own)


def local_of(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, or all of one that is not sharded."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter on every rank. A collective if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def set_last_micro_batch(model: torch.nn.Module, last: bool) -> None:
    """Gradients are reduced once per optimizer step, in the backward of its last micro-batch."""
    if isinstance(model, FSDPModule):
        sharded = cast(FSDPModule, model)
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)
