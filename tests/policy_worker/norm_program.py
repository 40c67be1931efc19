"""One rank of four whose parameters are laid out in different ways: `python -m tests.policy_worker.norm_program OUT`.

Takes one optimizer step; rank 0 writes the norm of its gradients and the whole parameters to OUT. `step_of` is the
same in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from policy_worker.parallel.mesh import ParallelDims
from policy_worker.trained.optim import Optimizer, OptimizerSettings
from tests.policy_worker.ranks import joined

CLIP = 0.5


def step_of(impl: str, place: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """The norm, and each parameter after the step. place: lays out the parameter or gradient of a name."""
    random = torch.Generator().manual_seed(0)
    parameters = {}
    for name in ("shards", "copies", "pieces", "rows", "plain"):
        parameters[name] = nn.Parameter(place(name, torch.randn(5, 6, generator=random)))
        parameters[name].grad = place(name, torch.randn(5, 6, generator=random))
    settings = OptimizerSettings((0.1,), (0.9, 0.99), 1e-2, 0.5, impl, CLIP)
    found = {"norm": torch.tensor(Optimizer(parameters.values(), settings).step(1.0))}
    for name, parameter in parameters.items():
        whole = parameter.detach()
        found[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return found


def main(out: Path, impl: str) -> None:
    with joined() as group:
        group.arrange(ParallelDims(dp_shard=2, tp=2))
        mesh = group.mesh()
        layouts = {
            "shards": (mesh["dp_shard"], [Shard(0)]),
            "copies": (mesh, [Replicate(), Replicate()]),
            "pieces": (mesh, [Shard(0), Shard(1)]),
            "rows": (mesh["tp"], [Shard(0)]),
        }

        def place(name: str, tensor: Tensor) -> Tensor:
            tensor = tensor.to(group.device)
            return distribute_tensor(tensor, *layouts[name]) if name in layouts else tensor

        found = {name: tensor.cpu().contiguous() for name, tensor in step_of(impl, place).items()}
        if group.leads:
            save_file(found, out / "tensors.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
