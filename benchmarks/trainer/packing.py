"""How evenly a step is cut over data ranks and packed into micro-batches: the plan alone, nothing is trained.

    python -m benchmarks.trainer.packing [--ranks 4] [--samples 512] [--steps 50]

Lengths are drawn log-normally about 665 tokens and end at 8,192: most are short, a few take most of the cap. Samples
are balanced over the ranks and packed. For each width of the distribution and cap, the mean and the worst step:

    balance      tokens of the fullest rank over the mean of all ranks, less 1
    efficiency   tokens over those that ranks would have computed had each micro-batch, which all wait for, been as
                 long everywhere as on the rank where it is longest
    batches      micro-batches of a rank over the fewest that its tokens need under the cap
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import options, report
from policy_worker.training.batches.cutting import Batching, plan_step

LONGEST = 8192
WORST = {"balance": np.max, "efficiency": np.min, "batches": np.max}


def figures_of(tokens: list[int], cap: int, ranks: int) -> tuple[float, float, float]:
    """(balance, efficiency, batches) of one optimizer step."""
    batching = Batching(samples=1, max_tokens=cap, packed=True, balance=True)
    (step,) = plan_step(tokens, [True] * len(tokens), batching, data_ranks=ranks)
    sizes = np.array([[sum(tokens[row] for row in rows) for rows in rank] for rank in step.ranks])
    of_ranks, total = sizes.sum(1), sizes.sum()
    fewest = -(-of_ranks.max() // cap)
    return of_ranks.max() / of_ranks.mean() - 1, total / (ranks * sizes.max(0).sum()), sizes.shape[1] / fewest


def main() -> None:
    given = options(__doc__, ranks=4, samples=512, steps=50)
    rows = {}
    for width in (0.6, 0.9, 1.2):
        for cap in (8192, 16384, 32768):
            rng = np.random.default_rng(0)
            lengths = np.clip(rng.lognormal(6.5, width, (given.steps, given.samples)), 16, LONGEST).astype(int)
            steps = np.array([figures_of(step.tolist(), cap, given.ranks) for step in lengths])
            rows[f"{width}, {cap}"] = {
                title: float(value)
                for (name, worst), of_steps in zip(WORST.items(), steps.T, strict=True)
                for title, value in ((name, of_steps.mean()), (f"worst {name}", worst(of_steps)))
            }
    report(given, rows, rows)


if __name__ == "__main__":
    main()
