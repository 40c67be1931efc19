"""A policy replica that is not like the others: `python -m tests.policy_worker.odd_program HOW`.

HOW is "bit": a bit of its weights turns with its fifth optimizer step; or "code": it is of other code.
"""

from __future__ import annotations

import sys

import torch

from policy_worker.__main__ import main
from policy_worker.replicas import identity
from policy_worker.trained.trainer import Trainer


def turn_a_bit() -> None:
    apply, seen = Trainer.apply, []

    def odd(self: Trainer, step: int) -> float:
        norm = apply(self, step)
        seen.append(step)
        if len(seen) == 5:
            with torch.no_grad():
                self.optimizer.parameters[0].view(-1)[:1].view(torch.int32).bitwise_xor_(1)
        return norm

    Trainer.apply = odd  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "bit":
        turn_a_bit()
    else:
        identity._code = lambda: "of another build"
    sys.argv[1:] = []
    sys.exit(main())
