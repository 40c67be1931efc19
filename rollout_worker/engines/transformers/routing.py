"""Which experts each mixture of a model chose, recorded while the window is filled.

transformers calls every layer of experts with what its router has chosen: experts(states [N, D], ids [N, k],
weights [N, k]), N tokens of one row after the other. So what is recorded is what was computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout_worker.engines.base import EngineConfigError

KEY = "train.train_policy.routing_replay"
NARROW = 256
"""The most experts whose ids fit into uint8."""
Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Record = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the ids and the weights of all mixtures, each [N, M, k]; see `views.WindowView.record`."""
Chosen = tuple[Ids, npt.NDArray[np.float32]]
"""Ids and weights [n, M, k]."""
LEAST_SHARED, LEAST_SHARED_HALF = 0.98, 0.9
"""Share of the recorded experts that a plain forward chooses as well: 1 and 0.98 were seen where log-probs were
right. Of what was chosen for other tokens it would choose about k of all experts."""
TOLERANCE, TOLERANCE_HALF = 1e-3, 0.1
"""Differences of their weights, as shares of the largest: the largest of them, and their mean in half precision."""


class RoutingError(RuntimeError):
    """A model calls its experts in a way that is not known here."""


class Routing:
    """Hooks on the layers of experts of a model; they record only within `into`."""

    def __init__(self, model: Any, wanted: str) -> None:
        """wanted: the value of KEY. Raises `EngineConfigError`."""
        self.wanted, self.model_name = wanted, type(model).__name__
        layers = [layer for layer in model.modules() if _is_experts(layer)]
        if not layers:
            raise self.refusal("its layers of experts cannot be found")
        self._mixtures, self._is_narrow = len(layers), max(layer.num_experts for layer in layers) <= NARROW
        self._calls: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._note, number), with_kwargs=True)

    def refusal(self, problem: str) -> EngineConfigError:
        return EngineConfigError(
            f'{KEY} = "{self.wanted}" cannot be done with {self.model_name}: {problem}; write {KEY} = "none"'
        )

    @contextmanager
    def into(self, record: Record) -> Iterator[None]:
        """Hand over what the experts are called with by one forward. Raises `RoutingError`."""
        calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._calls = calls
        try:
            yield
        finally:
            self._calls = None
        if [number for number, _, _ in calls] != list(range(self._mixtures)):
            raise RoutingError("its layers of experts are not called once each, in order")
        if len({ids.shape for _, ids, _ in calls}) != 1:
            raise RoutingError("its layers of experts are called with different numbers of experts")
        ids = torch.stack([ids for _, ids, _ in calls], 1)
        weights = torch.stack([weights for _, _, weights in calls], 1)
        record(ids.to(torch.uint8 if self._is_narrow else torch.int32), weights)

    def recorded(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Return what was recorded, of any shape, as a `Generation` has it."""
        dtype = np.uint8 if self._is_narrow else np.uint16
        expert_ids = ids.cpu().numpy().astype(dtype, order="C")  # a copy, as is the next
        return expert_ids, weights.float().cpu().numpy().astype(np.float32, order="C")

    def check(self, recorded: Sequence[Chosen], expected: Sequence[Chosen], exactly: bool) -> None:
        """Compare what was recorded with what a plain forward of the same tokens chooses.

        Where two experts are almost as likely either may be chosen, which happens more often in half precision
        (`exactly` is then false). Raises `EngineConfigError`.
        """
        ids, weights, plain_ids, plain = (
            np.concatenate([sample[i].reshape(-1, sample[i].shape[-1]) for sample in samples])
            for samples in (recorded, expected)
            for i in (0, 1)
        )
        same = ids[:, :, None] == plain_ids[:, None]
        shared = same.sum() / ids.size
        off = np.abs(weights[:, :, None] - plain[:, None])[same] / np.abs(plain).max()
        least, most = (LEAST_SHARED, TOLERANCE) if exactly else (LEAST_SHARED_HALF, TOLERANCE_HALF)
        if not (shared >= least and (off.max() if exactly else off.mean()) <= most):
            raise self.refusal(
                f"a plain forward chooses {shared:.0%} of the experts that were recorded, with weights that differ "
                f"by up to {off.max(initial=0.0):.2g} of the largest"
            )

    def _note(self, number: int, _: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._calls is None:
            return
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if len(tensors) != 3 or len(inputs) != 3 or named:
            raise RoutingError("its experts are not called with states, ids and weights")
        states, ids, weights = tensors
        if ids.is_floating_point() or ids.shape != weights.shape or ids.shape[:-1] != states.shape[:-1]:
            raise RoutingError("its experts are not called with the ids and weights of each token")
        self._calls.append((number, ids.flatten(0, -2), weights.flatten(0, -2)))


def _is_experts(layer: Any) -> bool:
    """Recognise layers of experts as the trainer does: in the same order, they are the mixtures of a record."""
    return type(layer).__name__.endswith("Experts") and hasattr(layer, "num_experts")
