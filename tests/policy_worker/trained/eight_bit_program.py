"""A step of torchao's AdamW in 8 bits, and what is kept of it.

`python -m tests.policy_worker.trained.eight_bit_program`, with torchao on the path.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from policy_worker.trained.optim import Optimizer, OptimizerSettings


def main() -> None:
    matrix, scalar = nn.Parameter(torch.ones(64, 192)), nn.Parameter(torch.ones(1))
    for parameter in (matrix, scalar):
        parameter.grad = torch.ones_like(parameter)
    settings = OptimizerSettings((0.1,), (0.9, 0.999), 1e-8, 0.0, "foreach", 0.0, name="AdamW8bit")
    optimizer = Optimizer([matrix, scalar], settings)
    optimizer.step(1.0)
    assert abs(matrix.mean().item() - 0.9) < 1e-3
    slots = dict(optimizer.slots())[matrix]
    shapes = {name: (tuple(slot.shape), slot.dtype) for name, slot in slots.items()}
    assert shapes["exp_avg.codes"] == ((64, 192), torch.uint8), shapes
    assert shapes["exp_avg.scale"] == ((64, 3), torch.float32), shapes
    assert slots["step"] == 1
    assert_the_same_from_host_memory(settings)


def assert_the_same_from_host_memory(settings: OptimizerSettings) -> None:
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(64, 192)) for _ in range(2)]
        optimizer = Optimizer(parameters, replace(settings, offload=offload))
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(1.0)
        slots = [slot for _, each in optimizer.slots() for slot in each.values()]
        found.append([*parameters, *slots])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))


if __name__ == "__main__":
    main()
