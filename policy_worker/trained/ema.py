"""A moving average of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from policy_worker.parallel.fsdp import local_of


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
