"""One of several ranks, of which one alone finds that gradients overflow: `python -m … OUT`."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from policy_worker.parallel.loss_scale import FIRST, LossScaler
from tests.policy_worker.ranks import joined


def main(out: Path) -> None:
    with joined() as group:
        scaler = LossScaler(group, "train.param_dtype")
        norms = (1.0, math.inf if group.rank else 1.0, 1.0)
        skipped = [scaler.skips(norm) for norm in norms]
        assert (skipped, scaler.state) == ([False, True, False], (FIRST / 2, 1))
        (out / str(group.rank)).touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
