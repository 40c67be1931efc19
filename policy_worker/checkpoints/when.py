"""When to save: every so many steps, every so many epochs, and after the last step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rhythm:
    """`[train.ckpt]`'s frequencies. epochs 0: by steps only."""

    enabled: bool
    steps: int
    epochs: int = 0

    def due(self, step: int, *, last: bool, epochs: int, epochs_before: int) -> bool:
        """Whether to save after `step` committed steps.

        last: no step follows. epochs, epochs_before: passes over the data that are complete now, and were when this
        was asked last.
        """
        if not self.enabled:
            return False
        by_epoch = self.epochs > 0 and epochs // self.epochs > epochs_before // self.epochs
        return last or by_epoch or step % self.steps == 0
