"""The record that stays of a run: `summary.json` for programs, a table at the end for people."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.display.view import FAILED, duration, number, rewards_text
from schema.util.atomic_file import write_text
from schema.util.text import one_line
from schema.wire import data_report
from schema.wire.messages import JobStatus, LedgerStatus, ReplicaInfo, StepRecord, ValidationRecord

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
ALL_DROPPED = "every prompt of this run has been dropped, so nothing is left to resume: start a run of its own"


@dataclass(slots=True)
class Collected:
    """The controller's last answers; parts that it could not give are None."""

    status: JobStatus | None = None
    ledger: LedgerStatus | None = None
    steps: list[StepRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    replicas: list[ReplicaInfo] = field(default_factory=list)
    missing: str = ""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, for the caller and for `summary.json`. Times are seconds."""

    exit_code: int
    outcome: str
    """finished, failed or stopped."""
    reason: str
    run_dir: Path
    elapsed: float
    collected: Collected
    restarts: Mapping[str, int]
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """Totals of the starts before this one (`RunDir.earlier`)."""

    @property
    def final_model(self) -> Path | None:
        """The exported model; None where an earlier start left one and training has gone on since."""
        final = self.run_dir / "final"
        try:
            written = (final / "config.json").stat().st_mtime
        except OSError:
            return None
        return final if self.outcome == "finished" or written >= time.time() - self.elapsed else None

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        data = self.collected
        return {
            "format": FORMAT,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "run_dir": str(self.run_dir),
            "elapsed_s": round(self.elapsed, 3),
            "final_model": str(self.final_model) if self.final_model else None,
            "data": _data(self.run_dir),
            # A sum of Counters leaves out what is 0.
            "restarts": dict.fromkeys(self.restarts, 0)
            | (Counter(self.restarts) + Counter(self.earlier.get("restarts", {}))),
            "starts": 1 + self.earlier.get("starts", 0),
            "total_elapsed_s": round(self.elapsed + self.earlier.get("elapsed_s", 0.0), 3),
            "status": data.status.model_dump(mode="json") if data.status else None,
            "ledger": data.ledger.model_dump(mode="json") if data.ledger else None,
            "steps": [step.model_dump(mode="json") for step in data.steps],
            "validations": [record.model_dump(mode="json") for record in data.validations],
            "replicas": [replica.model_dump(mode="json") for replica in data.replicas],
        }

    def write(self) -> None:
        write_text(self.run_dir / "summary.json", json.dumps(self.summary(), indent=2) + "\n")


def source_lines(ledger: dict[str, Any]) -> Iterator[str]:
    """Say what was trained of each source of a mixture, next to its share."""
    sources = ledger.get("sources", [])
    trained = sum(source["trained"] for source in sources)
    for source in sources:
        part, passes = source["trained"] / max(1, trained), source["drawn"] / source["rows"]
        yield (
            f"{source['name']}: {source['trained']:,} groups, {part:.1%} (share {source['share']:.1%}); "
            f"{source['dropped']:,} dropped, {passes:.2f} passes over {source['rows']:,} rows"
        )


def _data(run_dir: Path) -> dict[str, Any] | None:
    """Report what became of the rows of the data, without their texts."""
    report = data_report.read(run_dir)
    return report.model_dump(mode="json", exclude={"files": {"__all__": {"samples"}}}) if report else None


def out_of_data(summary: Mapping[str, Any]) -> bool:
    """Whether a failed run has dropped all there is: it would only fail again."""
    ledger = summary.get("ledger") or {}
    created: int = ledger.get("created", 0)
    return summary["outcome"] == "failed" and created > 0 and bool(ledger["states"].get("dropped") == created)


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the final table, from a summary (also one read back from disk)."""
    status, ledger = summary.get("status") or {}, summary.get("ledger") or {}
    outcome, reason = summary["outcome"], summary.get("reason") or ""
    lines = [("outcome", reason if reason.startswith(outcome) else f"{outcome}: {reason}" if reason else outcome)]
    if status:
        lines.append(("steps", f"{status['step']} of {status['total_steps']}"))
    starts, total = summary.get("starts", 1), summary.get("total_elapsed_s", summary["elapsed_s"])
    over = f" ({duration(total)} over {starts} starts)" if starts > 1 else ""
    lines.append(("time", duration(summary["elapsed_s"]) + over))
    if (report := data_report.parse(summary.get("data"))) is not None:
        lines.append(("data", data_report.brief(report)))
    lines += learning(summary.get("steps") or [], summary.get("validations") or [])
    if status:
        speed = f"{status['samples_per_s']:.1f} samples/s, {status['tokens_per_s']:.0f} tokens/s"
        idle = ", ".join(f"{role} {share:.1%}" for role, share in sorted(status["idle"].items()))
        lines += [("speed", speed), *([("idle", idle)] if idle else [])]
    if status.get("rewards"):  # not in summaries of older versions
        rewards = rewards_text(JobStatus.model_validate(status))
        lines += [("rewards", rewards)] if rewards else []
    if ledger and status.get("mode") == "grpo":
        mean = "–" if status.get("staleness_mean") is None else f"{status['staleness_mean']:.2f}"
        lines.append(("staleness", f"mean {mean}, max {ledger['max_staleness']}, bound {ledger['bound']}"))
        states = ", ".join(f"{name} {count}" for name, count in ledger["states"].items() if count)
        lines.append(("groups", f"{ledger['created']} created" + (f": {states}" if states else "")))
        lines += [("trained of", text) for text in source_lines(ledger)]
        if ledger["dropped"]:
            dropped = ", ".join(f"{name} {count}" for name, count in ledger["dropped"].items())
            lines.append(("dropped", dropped))
    restarts = {name: count for name, count in (summary.get("restarts") or {}).items() if count}
    lines.append(("restarts", ", ".join(f"{name} {count}" for name, count in restarts.items()) or "none"))
    if summary.get("final_model"):
        lines.append(("model", summary["final_model"]))
    lines.append(("logs", str(Path(summary["run_dir"]) / "logs")))
    return [(name, one_line(value)) for name, value in lines]


def learning(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Reward or loss, and held-out accuracy: before → after."""
    lines: list[tuple[str, str]] = []
    for name, key in (("reward", "reward_mean"), ("loss", "loss")):
        values = [step["metrics"][key] for step in steps if key in step["metrics"]]
        if values and not (name == "loss" and lines):
            edge = max(1, min(5, len(values) // 4))
            before, after = sum(values[:edge]) / edge, sum(values[-edge:]) / edge
            lines.append((name, f"{before:.3f} → {after:.3f} (mean of the first and last {edge} steps)"))
    if validations:
        first, last = validations[0], validations[-1]
        before, after = (number(_held_out(record)) or FAILED for record in (first, last))
        change = f"{before} → " if len(validations) > 1 else ""
        where = f"(version {first['version']} → {last['version']}, {last['samples']} samples)"
        failed = f", {last['errors']} gradings failed" if last.get("errors") else ""
        loss = "" if last.get("loss") is None else "loss "
        scored = last.get("scores") is not None and last.get("score_mean") is not None
        score = f", score {number(last['score_mean'])}" if loss and scored else ""
        lines.append(("held-out", f"{loss}{change}{after}{score} {where}{failed}"))
    return lines


def _held_out(record: Mapping[str, Any]) -> float | None:
    """Return the number that judges a validation; summaries of older versions have no loss."""
    loss: float | None = record.get("loss")
    return record["score_mean"] if loss is None else loss


def table(summary: Mapping[str, Any]) -> Table:
    """The final table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    style = {"finished": "green", "failed": "red"}.get(summary["outcome"], "yellow")
    grid = Table(show_header=False, title="cosmos-launch", border_style=style, title_style=f"bold {style}")
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows(summary):
        grid.add_row(name, Text(value))
    return grid
