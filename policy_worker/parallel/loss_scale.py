"""Dynamic loss scaling: gradients that would vanish in float16, whose least positive number is 6e-8, are computed of
a larger loss, and divided again before they are clipped (arXiv 1710.03740).

    backward        of scale · loss
    before a step   gradients / scale, which is exact for a power of 2
    all finite      the step is made; after `STEADY` of them in a row the scale doubles
    else            no rank makes it, gradients are forgotten, and the scale is halved

The rule and its numbers are those of torch.amp.GradScaler. That class looks for overflows by itself, optimizer by
optimizer and in one mesh at a time; a model here may have several of each, and stages on other ranks. The norm that
clipping needs anyway is of all of them, and not finite where any gradient is not; so that no rank makes a step that
another one skips, even where copies of a gradient were rounded apart, all ranks of the replica say what they found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from policy_worker.errors import NonFiniteGradientError
from policy_worker.memory.offload import local_of
from policy_worker.parallel.rank_group import RankGroup
from schema.config.sections.optimizer import PrecisionKeys

log = logging.getLogger(__name__)

FIRST, LEAST, STEADY = 2.0**16, 1.0, 2000
"""The scale at the start, the least one, and steps in a row after which it doubles."""


def scaled_by(keys: PrecisionKeys) -> str | None:
    """The key by which gradients are computed or added up in float16; None: they are not."""
    names = ("param_dtype", "fsdp_reduce_dtype")
    return next((name for name in names if getattr(keys, name) == "float16"), None)


class LossScaler:
    """The loss scaler of one model. key: the one that says float16, for messages.

    state: the scale, and how many steps were made since it changed; the same on all ranks."""

    def __init__(self, group: RankGroup, key: str) -> None:
        self._group, self._key = group, key
        self.state = FIRST, 0
        self._skipped = 0

    @property
    def scale(self) -> float:
        """The factor of a loss."""
        return self.state[0]

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the gradients by the scale, once per optimizer step."""
        gradients = [local_of(p.grad) for p in parameters if p.grad is not None]
        if gradients:  # none where nothing trains in this stage of the model
            torch._foreach_mul_(gradients, 1 / self.scale)

    def skips(self, norm: float) -> bool:
        """Whether the step of gradients of this norm is skipped, on all ranks alike; the scale follows. A collective.

        Raises `NonFiniteGradientError`: a smaller scale would not help; nothing was applied."""
        scale, made = self.state
        if not self._group.any(not math.isfinite(norm)):
            grows = made + 1 == STEADY
            self.state = (2 * scale, 0) if grows else (scale, made + 1)
            return False
        if scale <= LEAST:
            raise NonFiniteGradientError(
                f"gradients are not finite at a loss scale of {scale:g}: nothing was applied; what the model "
                f"computes is beyond float16 (65504) or NaN: write {self._key} = "
                f'"bfloat16", or check the model\'s weights and the loss of the last steps'
            )
        self.state = scale / 2, 0
        self._skipped += 1
        section = self._key.partition(".")[0]
        log.warning("%s: gradients overflow: the step is skipped, the loss scale is %g", section, scale / 2)
        return True

    def metrics(self) -> dict[str, float]:
        """The scale, and the steps that were skipped since this was asked last."""
        skipped, self._skipped = self._skipped, 0
        return {"loss_scale": self.scale, "skipped_steps": float(skipped)}
