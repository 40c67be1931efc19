"""What the quickstart shows at its end: a table before/after, a learning curve, three answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from try_model import Comparison

DRAW_TIMEOUT = 120.0


@dataclass(frozen=True)
class Phase:
    """One finished job of cosmos-launch, from its `summary.json`. Times are seconds, instants Unix time."""

    run_dir: Path
    started: float
    ended: float
    summary: dict[str, Any]

    @classmethod
    def read(cls, run_dir: Path, started: float, ended: float) -> Phase:
        return cls(run_dir, started, ended, json.loads((run_dir / "summary.json").read_text(encoding="utf-8")))

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def steps(self) -> list[dict[str, Any]]:
        return list(self.summary["steps"])

    @property
    def validations(self) -> list[dict[str, Any]]:
        return sorted(self.summary["validations"], key=lambda record: record["version"])

    def metric(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was reported."""
        found = [(step["step"], step["metrics"][name]) for step in self.steps if name in step["metrics"]]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def samples_s(self) -> float:
        """Samples per second in the steady state: those of the steps between the first and the last commit."""
        return self._rate(lambda metrics: metrics["sampled"])

    @property
    def tokens_s(self) -> float:
        """Response tokens per second in the steady state."""
        return self._rate(lambda metrics: metrics["sampled"] * metrics["response_tokens_mean"])

    def _rate(self, count: Callable[[dict[str, float]], float]) -> float:
        first, *rest = self.steps
        return sum(count(step["metrics"]) for step in rest) / (rest[-1]["at"] - first["at"])

    def idle(self, role: str) -> float:
        """The share of the time since training began in which a role had nothing to do."""
        return float(self.summary["status"]["idle"][role])


@dataclass(frozen=True)
class Story:
    """The whole quickstart in numbers."""

    make_seconds: float
    warm: Phase
    grpo: Phase
    base_accuracy: float
    seconds: float

    @property
    def seconds_to_first_step(self) -> float:
        """From the end of the warm start to the first optimizer step of reinforcement."""
        return float(self.grpo.steps[0]["at"]) - self.warm.ended

    def rows(self) -> list[tuple[str, str]]:
        """The lines of the table."""
        first, *during, last = self.grpo.validations
        ledger = self.grpo.summary["ledger"]
        middle = ", ".join(f"{record['score_mean']:.0%} (step {record['version']})" for record in during)
        return [
            ("held-out accuracy, untrained", f"{self.base_accuracy:.1%}"),
            ("  after the warm start (SFT)", f"{first['score_mean']:.1%}"),
            *([("  during reinforcement", middle)] if middle else []),
            ("  after reinforcement (GRPO)", f"{last['score_mean']:.1%}"),
            ("response length", f"{first['response_tokens_mean']:.1f} → {last['response_tokens_mean']:.1f} tokens"),
            ("speed", f"{self.grpo.samples_s:.0f} samples/s, {self.grpo.tokens_s:.0f} response tokens/s"),
            ("idle", f"trainer {self.grpo.idle('policy'):.1%}, generator {self.grpo.idle('rollout'):.1%}"),
            ("staleness", f"at most {ledger['max_staleness']} steps, bound {ledger['bound']}"),
            ("first GRPO step", f"{self.seconds_to_first_step:.1f} s after the warm start"),
            (
                "time",
                f"model {self.make_seconds:.0f} s, warm start {self.warm.seconds:.0f} s, "
                f"reinforcement {self.grpo.seconds:.0f} s, all {self.seconds:.0f} s",
            ),
        ]


def print_story(story: Story, comparison: Comparison, curve: Path) -> None:
    """Print the table, the answers, and where things are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(show_header=False, title="Before and after", title_style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in story.rows():
        table.add_row(name, value)
    answers = Table(title="Three held-out sums, answered greedily", title_style="bold")
    for header in ("question", "after the warm start", "after reinforcement", ""):
        answers.add_column(header, overflow="fold")
    for answer in comparison.answers:
        mark = Text("right", "green") if answer.is_right else Text(f"wrong: {answer.reference}", "red")
        answers.add_row(Text(answer.question), Text(answer.before), Text(answer.after), mark)
    console.print()
    console.print(table)
    console.print(answers)
    console.print(f"learning curve  {curve}", soft_wrap=True, highlight=False)
    console.print(f"trained model   {story.grpo.run_dir / 'final'}", soft_wrap=True, highlight=False)


def draw_curve(grpo: Phase, path: Path) -> Path:
    """The run's learning curves, as `cosmos-launch plot` draws them."""
    command = [sys.executable, "-P", "-m", "cosmos_launch", "plot", str(grpo.run_dir), "--output", str(path)]
    subprocess.run(command, check=True, timeout=DRAW_TIMEOUT, stdout=subprocess.DEVNULL)
    return path
