"""The learning rate as a pure function of the number of committed steps.

       1 ┤      ┌───────────┐
         │     /             \\        warm-up W steps, stable, decay D steps ending at `total`
     min ┤    /               \\______
   start ┤   /
         └───0──W────────total−D─total

One schedule step per committed step: all optimizer steps of training step t use factor(t). Warm-up from f:
f + (1 - f)(t + 1)/W at step t < W, so that no batch is trained at a rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from schema.config.sections.optimizer import OptimizerKeys

DecayType = Literal["linear", "cosine", "sqrt", "none", "wsd"]

_REMAINING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "wsd": lambda p: (1 + math.cos(math.pi * p)) / 2,
}
"""Share of the way from minimum to peak that is left at share p of the decay.

sqrt: arXiv 2405.18392, eq. 1 ("1-sqrt"). wsd: warm-up, stable, decay, arXiv 2404.06395, here with a cosine.
"""


@dataclass(frozen=True)
class Schedule:
    """Factors of the peak learning rate.

    Args:
        total_steps: length of the run.
        warmup_steps: an int counts steps, a float is a share of `total_steps`.
        warmup_start_factor: factor from which the warm-up rises; step 0 is one W-th of the way above it.
        decay_ratio: share of the run, at its end, over which the rate decays; None or 0: no decay. Decay never
            begins before the warm-up has ended.
        decay_type: None or "none": no decay.
        min_factor: factor at the end of the decay and after it.
    """

    total_steps: int
    warmup_steps: int | float = 0
    warmup_start_factor: float = 0.0
    decay_ratio: float | None = None
    decay_type: DecayType | None = None
    min_factor: float = 0.0

    @staticmethod
    def of_config(keys: OptimizerKeys, total_steps: int) -> Schedule:
        """As `[train]` or `[critic]` has it."""
        return Schedule(
            total_steps=total_steps,
            warmup_steps=keys.optm_warmup_steps,
            warmup_start_factor=keys.optm_warmup_start_factor,
            decay_ratio=keys.optm_decay_ratio,
            decay_type=keys.optm_decay_type,
            min_factor=keys.optm_min_lr_factor,
        )

    @property
    def warmup(self) -> int:
        """Length of the warm-up in steps."""
        if isinstance(self.warmup_steps, float):
            return round(self.warmup_steps * self.total_steps)
        return self.warmup_steps

    def factor(self, step: int) -> float:
        """Factor of the training step that follows `step` committed steps."""
        if step < self.warmup:
            return self.warmup_start_factor + (1 - self.warmup_start_factor) * (step + 1) / self.warmup
        if not self.decay_ratio or self.decay_type in (None, "none"):
            return 1.0
        start = max(self.warmup, self.total_steps - round(self.decay_ratio * self.total_steps))
        if step < start:
            return 1.0
        if step >= self.total_steps:
            return self.min_factor
        share = (step - start) / (self.total_steps - start)
        return self.min_factor + (1 - self.min_factor) * _REMAINING[self.decay_type](share)
