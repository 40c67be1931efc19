"""How evenly a step is cut over data ranks and packed into micro-batches: the plan alone, nothing is trained.

    python -m benchmarks.trainer.packing [--ranks 4] [--samples 512] [--steps 50]

Lengths are drawn log-normally about 665 tokens and end at 8,192: most are short, a few take most of the cap. Samples
are balanced over the ranks and packed. Ends with one line of JSON, for each width of the distribution and cap the
mean and the worst step:

    balance      tokens of the fullest rank over the mean of all ranks, less 1
    efficiency   tokens over those that ranks would have computed had each micro-batch, which all wait for, been as
                 long everywhere as on the rank where it is longest
    batches      micro-batches of a rank over the fewest that its tokens need under the cap
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from policy_worker.training.batches.cutting import Batching, plan_step

LONGEST = 8192


def figures_of(tokens: list[int], cap: int, ranks: int) -> tuple[float, float, float]:
    """(balance, efficiency, batches) of one optimizer step."""
    batching = Batching(samples=1, max_tokens=cap, packed=True, balance=True)
    (step,) = plan_step(tokens, [True] * len(tokens), batching, data_ranks=ranks)
    sizes = np.array([[sum(tokens[row] for row in rows) for rows in rank] for rank in step.ranks])
    of_ranks, total = sizes.sum(1), sizes.sum()
    fewest = -(-of_ranks.max() // cap)
    return of_ranks.max() / of_ranks.mean() - 1, total / (ranks * sizes.max(0).sum()), sizes.shape[1] / fewest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    found = {}
    for width in (0.6, 0.9, 1.2):
        for cap in (8192, 16384, 32768):
            rng = np.random.default_rng(0)
            steps = np.array(
                [
                    figures_of(
                        np.clip(rng.lognormal(6.5, width, options.samples), 16, LONGEST).astype(int).tolist(),
                        cap,
                        options.ranks,
                    )
                    for _ in range(options.steps)
                ]
            )
            worst = steps[:, 0].max(), steps[:, 1].min(), steps[:, 2].max()
            row = {
                name: [round(float(mean), 4), round(float(most), 4)]
                for name, mean, most in zip(
                    ("balance", "efficiency", "batches"), steps.mean(0), worst, strict=True
                )
            }
            found[f"{width}, {cap}"] = row
            print(f"width {width}, cap {cap}: {row}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
