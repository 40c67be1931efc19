"""The weights of one version, as an engine takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weight_sync import hub_tensors


@dataclass(frozen=True)
class Snapshot:
    """Copies of a model's weights in host memory, under the names of the hub."""

    weights: list[tuple[str, torch.Tensor]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> Snapshot:
        return cls([(name, tensor.to("cpu", copy=True)) for name, tensor in hub_tensors(model)])

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self.weights
