"""What stale samples do to learning, and what a correction and a bound do about it.

    python -m benchmarks.learning.staleness [--out docs/images/staleness.png] [--steps 60]

Trainer and engine are those of a job, driven in one process by a schedule that makes every sample exactly `lag`
steps old: the batch of step t is generated with the weights of version max(0, t − lag). Each case trains the
quickstart's plain task from the same warm-started model. "ignored" is a trainer that takes its own log-probs for
those of the policy that sampled (a ratio of 1, as if the data were fresh); "corrected" uses the behaviour
log-probs that came with the samples, which is what this project does.
A figure is the share of right answers, sampled, in the last ten steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import QUICKSTART, options, report, say
from benchmarks.jobs import warm_model
from benchmarks.learning.in_process import learn
from policy_worker.model.micro_batch import TrainSample
from policy_worker.trained.trainer import Trainer
from schema.config import Config, load_config
from schema.wire.sample import Sample


@dataclass(frozen=True)
class Case:
    """One training run: how old its samples are, and whether the trainer knows it."""

    lag: int
    lr: float
    corrected: bool = True

    @property
    def name(self) -> str:
        how = "corrected" if self.corrected else "ignored"
        return f"lag {self.lag}, lr {self.lr:g}" + (f", {how}" if self.lag else "")


def config_of(case: Case, model: Path) -> Config:
    overrides = [
        f'policy.model_name_or_path="{model}"',
        f"train.optm_lr={case.lr}",
        f"train.train_policy.allowed_outdated_steps={case.lag}",
    ]
    return load_config(QUICKSTART / "grpo_plain.toml", overrides)


def as_if_fresh(trainer: Trainer, groups: list[list[Sample]]) -> None:
    """Put the trainer's present log-probs in the place of those that the tokens were sampled with (temperature 1)."""
    for samples in groups:
        rows = {row: TrainSample.of_wire(sample) for row, sample in enumerate(samples)}
        (batch,) = trainer.micro_batches(rows, [list(rows)])
        with torch.no_grad():
            logprobs = trainer.forward(batch, 1.0).logprobs.numpy()
        start = 0
        for sample in samples:
            mask = sample.loss_mask == 1
            sample.logprobs[mask] = np.minimum(logprobs[start : start + mask.sum()], 0.0)
            start += int(mask.sum())


def accuracies(case: Case, model: Path, steps: int = 60) -> list[float]:
    """Share of right answers among the samples of each step."""
    with tempfile.TemporaryDirectory() as out:
        alter = None if case.corrected else as_if_fresh
        learned = asyncio.run(learn(config_of(case, model), Path(out), steps, case.lag, alter))
    return [metrics["reward/boxed_math"] for metrics in learned.metrics]


def end(curve: list[float]) -> float:
    """Mean of the last ten steps."""
    return float(np.mean(curve[-10:]))


CASES = (
    Case(0, 3e-4),
    Case(4, 3e-4),
    Case(8, 3e-4),
    Case(8, 3e-4, corrected=False),
    Case(0, 1e-3),
    Case(4, 1e-3),
    Case(4, 1e-3, corrected=False),
    Case(6, 1e-3),
    Case(6, 1e-3, corrected=False),
    Case(8, 1e-3),
)


def draw(curves: dict[Case, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({case.lr for case in curves})
    figure, axes = plt.subplots(1, len(rates), figsize=(5.2 * len(rates), 3.6), sharey=True, squeeze=False)
    colours = {0: "black", 4: "tab:blue", 6: "tab:green", 8: "tab:orange"}
    for axis, rate in zip(axes[0], rates, strict=True):
        for case, curve in curves.items():
            if case.lr == rate:
                style = "-" if case.corrected else ":"
                axis.plot(smooth(curve), style, color=colours[case.lag], label=case.name)
        axis.set(title=f"learning rate {rate:g}", xlabel="step", ylim=(0, 1))
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("right answers (sampled)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def smooth(curve: list[float], window: int = 5) -> list[float]:
    return [float(np.mean(curve[max(0, i - window + 1) : i + 1])) for i in range(len(curve))]


def main() -> None:
    given = options(
        __doc__, out=(Path, "draw the curves into this PNG"), steps=60,
        model=(Path, "a warm-started model; made if not named"),
    )  # fmt: skip
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or warm_model(Path(folder))
        for case in CASES:
            curves[case] = accuracies(case, model, given.steps)
            say(f"{case.name:36} {end(curves[case]):.3f}")
    if given.out:
        draw(curves, given.out)
    rows = {case.name: {"right": end(curve)} for case, curve in curves.items()}
    report(given, rows, rows)


if __name__ == "__main__":
    main()
