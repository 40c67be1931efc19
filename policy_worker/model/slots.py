"""What an optimizer keeps of a parameter as plain tensors that any number of ranks can save and load.

torchao's moments are blocks of 8-bit codes with a scale each. A block lies in one row, so that a cut between rows
cuts codes and scales alike:

    exp_avg [N, D] in 8 bits   ->   exp_avg.codes [N, D] uint8,  exp_avg.scale [N, D / block] float32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from policy_worker.memory.offload import mapped

Slots = dict[str, Tensor]

LEAST_NUMBERS = 4096
"""torchao leaves smaller parts of a parameter in float32 (as arXiv 2110.02861)."""
LEAST_BLOCK = 64


def fits_blocks(parameter: nn.Parameter) -> bool:
    """Whether torchao keeps a parameter in 8 bits on every rank alike, with blocks that lie in one whole row."""
    if parameter.ndim != 2 or parameter.shape[1] % LEAST_BLOCK:
        return False
    if isinstance(parameter, DTensor) and parameter.to_local().shape[1] != parameter.shape[1]:
        return False
    shards = 1
    if isinstance(parameter, DTensor):
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        for placement, size in sizes:
            shards *= 1 if placement.is_replicate() else size
    return parameter.shape[0] % shards == 0 and parameter.numel() // shards >= LEAST_NUMBERS


def slots_of(parameter: nn.Parameter, state: Mapping[str, Any]) -> Slots:
    """The tensors of a parameter's state: writing into them changes it."""
    found: Slots = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        local = value._local_tensor if isinstance(value, DTensor) else value
        if not hasattr(local, "codes"):
            found[name] = value
            continue
        rows = local.codes.shape[0]
        for part in ("codes", "scale"):
            found[f"{name}.{part}"] = _laid_out_as(parameter, getattr(local, part).view(rows, -1))
    return found


def _laid_out_as(parameter: Tensor, local: Tensor) -> Any:
    """A tensor [rows of this rank, n] as the parameter's rows lie on the ranks."""
    if not isinstance(parameter, DTensor):
        return local
    size = torch.Size((parameter.shape[0], local.shape[1]))
    empty = DTensor.from_local(
        torch.empty_like(local, device="meta"), parameter.device_mesh, parameter.placements,
        run_check=False, shape=size, stride=(size[1], 1),
    )  # fmt: skip
    return mapped(empty, lambda _: local)
