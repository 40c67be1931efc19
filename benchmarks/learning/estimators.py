"""What each advantage estimator learns under each policy loss: the quickstart's task, from one warm start.

    python -m benchmarks.learning.estimators [--steps 40] [--lag 2] [--model DIR] [--results learning.jsonl]

A cell is a job in one process (see `in_process`) with the settings of `examples/quickstart/grpo_plain.toml`, but for
estimator and loss; every sample is `lag` steps old, the quickstart's bound. `gae` has the critic of
`examples/recipes/ppo.toml`. Its figure is the share of right answers to 200 held-out sums, sampled at temperature 1,
after the last step: one seed, so single figures move by several points. Losses that are one function share a cell.

--results: a line of JSON for each cell as it is done; cells that the file has are not trained again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness import QUICKSTART, ROOT, options, report, say
from benchmarks.jobs import warm_model
from benchmarks.learning.in_process import learn
from policy_worker.algorithms.losses import policy_loss_of
from schema.config import Config, load_config
from schema.config.algorithms import ESTIMATORS, LOSSES

CRITIC = ROOT / "examples" / "recipes" / "ppo.toml"
Cell = tuple[str, str]


def distinct() -> dict[str, str]:
    """Each loss and the first one that is the same function."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(policy_loss_of(name).loss_fn, name) for name in LOSSES}


def config_of(cell: Cell, model: Path, lag: int) -> Config:
    estimator, loss = cell
    overrides = [
        f'policy.model_name_or_path="{model}"',
        f"train.train_policy.allowed_outdated_steps={lag}",
        f'train.train_policy.advantage_estimator="{estimator}"',
        f'train.train_policy.variant="{loss}"',
    ]
    if LOSSES[loss].clips == "nothing":
        overrides.append("train.train_policy.epsilon_high=0.2")  # the default: the quickstart's would have no effect
    if estimator == "gae":
        keys = tomllib.loads(CRITIC.read_text())["critic"]
        overrides += [f"critic.{name}={json.dumps(value)}" for name, value in keys.items()]
    return load_config(QUICKSTART / "grpo_plain.toml", overrides)


def known(path: Path | None) -> dict[Cell, float]:
    """The cells of earlier runs."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {(row["estimator"], row["loss"]): row["accuracy"] for row in map(json.loads, lines)}


def markdown(found: dict[Cell, float]) -> str:
    """Estimators down, losses across; the same function in one column."""
    columns: dict[str, list[str]] = {}
    for name, first in distinct().items():
        columns.setdefault(first, []).append(f"`{name}`")
    lines = [
        "| | " + " | ".join(", ".join(names) for names in columns.values()) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for estimator in ESTIMATORS:
        cells = [found.get((estimator, loss)) for loss in columns]
        shown = " | ".join("" if value is None else f"{100 * value:.1f}" for value in cells)
        lines.append(f"| `{estimator}` | {shown} |")
    return "\n".join(lines)


def trained(cell: Cell, model: Path, folder: Path, steps: int, lag: int) -> dict[str, Any]:
    """One cell. folder: where the data are, the same for all."""
    began = time.process_time()
    learned = asyncio.run(learn(config_of(cell, model, lag), folder, steps, lag))
    return {
        "estimator": cell[0],
        "loss": cell[1],
        "accuracy": learned.accuracy,
        "curve": [round(metrics["reward/boxed_math"], 3) for metrics in learned.metrics],
        "grad_norm": [round(metrics["grad_norm"], 3) for metrics in learned.metrics],
        "cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    given = options(
        __doc__, steps=40, lag=2, model=(Path, "a warm-started model; made if not named"),
        results=(Path, "go on with this file"),
    )  # fmt: skip
    found = known(given.results)
    cells = product(ESTIMATORS, dict.fromkeys(distinct().values()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or warm_model(folder)
        for cell in (cell for cell in cells if cell not in found):
            row = trained(cell, model, folder, given.steps, given.lag)
            found[cell] = row["accuracy"]
            say(f"{cell[0]:>28} {cell[1]:<10} {row['accuracy']:.3f}  {row['cpu_s']} s")
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(markdown(found))
    report(given, {f"{estimator}, {loss}": value for (estimator, loss), value in found.items()})


if __name__ == "__main__":
    main()
