"""AdamW with clipping by global norm; refuses gradients that would destroy the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from policy_worker.errors import NonFiniteGradientError, SettingsError
from schema.config.sections.optimizer import OptimizerKeys


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer keys of `[train]` or `[critic]`; grad_norm_clip 0: gradients are not clipped."""

    lr: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    impl: str
    grad_norm_clip: float

    @staticmethod
    def of_config(keys: OptimizerKeys) -> OptimizerSettings:
        def single(value: object) -> object:
            return value[0] if isinstance(value, list) else value

        return OptimizerSettings(
            lr=float(single(keys.optm_lr)),  # type: ignore[arg-type]
            betas=(keys.optm_betas[0], keys.optm_betas[1]),
            epsilon=keys.epsilon,
            weight_decay=keys.optm_weight_decay,
            impl=str(single(keys.optm_impl)),
            grad_norm_clip=keys.optm_grad_norm_clip,
        )


class Optimizer:
    """One AdamW over all parameters that train (decoupled weight decay, arXiv 1711.05101)."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> None:
        self._settings = settings
        self.parameters = [p for p in parameters if p.requires_grad]
        for device, dtype in {(p.device, p.dtype) for p in self.parameters}:
            _check_possible(settings, torch.zeros(1, device=device, dtype=dtype))
        self.adamw = _adamw(self.parameters, settings)

    @property
    def peak_lr(self) -> float:
        """The learning rate at factor 1."""
        return self._settings.lr

    def set_peak_lr(self, lr: float) -> None:
        """Go on with the peak of a restored schedule instead of the configured one."""
        self._settings = replace(self._settings, lr=lr)

    def apply_settings(self) -> None:
        """Put the configured numbers into the parameter groups (a restored state brings those it was saved with)."""
        for group in self.adamw.param_groups:
            group["betas"], group["eps"] = self._settings.betas, self._settings.epsilon
            group["weight_decay"] = self._settings.weight_decay

    def forget(self) -> None:
        """Begin anew: moments and step counts are those of an optimizer that was just made."""
        self.adamw.state.clear()

    def step(self, lr_factor: float) -> float:
        """Clip, apply, forget the gradients. A collective on sharded parameters.

        Returns:
            The global gradient norm before clipping.

        Raises:
            NonFiniteGradientError: on all ranks alike; nothing was applied.
        """
        alike = _by_layout((p for p in self.parameters if p.grad is not None), lambda p: p.grad)
        norm = torch.tensor(math.hypot(*map(_norm, alike)))
        value = float(norm)
        if not math.isfinite(value):
            raise NonFiniteGradientError(
                f"the gradient norm is {value}: nothing was applied; look at the loss of the last steps, lower "
                f"train.optm_lr or train.optm_grad_norm_clip, or check the model's weights for NaN"
            )
        if 0 < self._settings.grad_norm_clip < value:
            for parameters in alike:
                clip_grads_with_norm_(parameters, self._settings.grad_norm_clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = self._settings.lr * lr_factor
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return value


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": alike} for alike in _by_layout(parameters, lambda p: p)],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=settings.impl == "fused",
        foreach=settings.impl == "foreach",
    )


def _check_possible(settings: OptimizerSettings, like: Tensor) -> None:
    """Try a step on one number: torch finds out at the first step, by then a batch would be lost."""
    probe = nn.Parameter(like)
    probe.grad = torch.zeros_like(like)
    try:
        _adamw([probe], settings).step()
    except (RuntimeError, NotImplementedError) as error:
        raise SettingsError(
            f'train.optm_impl = "{settings.impl}" is not possible for {like.dtype} on {like.device}: {error}; '
            f'write train.optm_impl = "foreach" or "for-loop"'
        ) from error


def _by_layout(
    parameters: Iterable[nn.Parameter], tensor_of: Callable[[nn.Parameter], Tensor | None]
) -> list[list[nn.Parameter]]:
    """Parameters by mesh and placements of a tensor of theirs: one operation takes only tensors laid out alike."""
    found: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        tensor = tensor_of(parameter)
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        found.setdefault(layout, []).append(parameter)
    return list(found.values())


def _norm(alike: Iterable[nn.Parameter]) -> float:
    """The norm of whole gradients. A collective of their mesh."""
    norm = get_total_norm([p.grad for p in alike if p.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
