"""The learning rate as a pure function of the number of committed steps.

       1 ┤      ┌───────────┐
         │     /             \\        warm-up W steps, stable, decay D steps ending at `total`
     min ┤    /               \\______
   start ┤   /
         └───0──W────────total−D─total

One schedule step per committed step: all optimizer steps of training step t use factor(t). Warm-up from f:
f + (1 - f)(t + 1)/W at step t < W, so that no batch is trained at a rate of 0. `inverse_sqrt` is stable nowhere:
max(min, sqrt(W / t)) from step W on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from schema.config.sections.optimizer import OptimizerKeys

DecayType = Literal["linear", "cosine", "sqrt", "none", "wsd", "inverse_sqrt"]
WsdDecayType = Literal["cosine", "linear", "exponential"]


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
        decay_steps: the length of the decay in steps; it comes before `decay_ratio`.
        num_cycles: waves of a cosine; after an end that is not a whole number of halves the rate stays where it is.
        wsd_decay_type: the decay of "wsd".
    """

    total_steps: int
    warmup_steps: int | float = 0
    warmup_start_factor: float = 0.0
    decay_ratio: float | None = None
    decay_type: DecayType | None = None
    min_factor: float = 0.0
    decay_steps: int | None = None
    num_cycles: float = 0.5
    wsd_decay_type: WsdDecayType = "cosine"

    @staticmethod
    def of_config(keys: OptimizerKeys, total_steps: int) -> Schedule:
        """The schedule of a trained model in a run of `total_steps`."""
        return Schedule(
            total_steps=total_steps,
            warmup_steps=keys.optm_warmup_steps,
            warmup_start_factor=keys.optm_warmup_start_factor,
            decay_ratio=keys.optm_decay_ratio,
            decay_type=keys.optm_decay_type,
            min_factor=keys.optm_min_lr_factor,
            decay_steps=keys.optm_decay_steps,
            num_cycles=keys.optm_num_cycles,
            wsd_decay_type=keys.optm_wsd_decay_type,
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
        if self.decay_type == "inverse_sqrt":
            begin = max(self.warmup, 1)
            return max(self.min_factor, math.sqrt(begin / max(step, begin)))
        length = self.decay_steps or round((self.decay_ratio or 0.0) * self.total_steps)
        start = max(self.warmup, self.total_steps - length)
        if self.decay_type in (None, "none") or not length or step < start:
            return 1.0
        share = 1.0 if step >= self.total_steps else (step - start) / (self.total_steps - start)
        return self.min_factor + (1 - self.min_factor) * self._remaining(share)

    def _remaining(self, p: float) -> float:
        """Share of the way from minimum to peak that is left at share p of the decay.

        sqrt: arXiv 2405.18392, eq. 1 ("1-sqrt"). wsd: warm-up, stable, decay, arXiv 2404.06395; its exponential is
        2^(1 - p) - 1, a half-life that is shifted to end at 0 (Megatron-LM)."""
        kind = self.wsd_decay_type if self.decay_type == "wsd" else self.decay_type
        if kind == "linear":
            return 1 - p
        if kind == "sqrt":
            return 1 - math.sqrt(p)
        if kind == "exponential":
            return 2 ** (1 - p) - 1
        return (1 + math.cos(2 * math.pi * self.num_cycles * p)) / 2

    def progress(self, step: int) -> float:
        """How far the run is at a step: 0 at its first, 1 at its last and after it."""
        return min(step / (self.total_steps - 1), 1.0) if self.total_steps > 1 else 1.0
