"""A running job as people see it: a pure function from a `View` to a panel (terminal) or a line (log).

The terminal's panel is redrawn every second. A log gets one line of `key=value` at each change of step or phase, at
most one in two seconds, and a sign of life every thirty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schema.util.text import one_line, visible
from schema.wire.messages import TERMINAL_PHASES, JobStatus, Phase, SampleRecord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LINE_EVERY, SIGN_OF_LIFE = 2.0, 30.0
BAR_WIDTH, SPARK_WIDTH = 30, 40
_TICKS = "▁▂▃▄▅▆▇█"
WORTH_SHOWING = 0.01
"""Share of the time that is shown."""
WORTH_TELLING = 0.01
"""Seconds per sample that are shown."""
FAILED = "every reward failed"
"""Shown in place of a score where no sample could be scored."""
FAILED_ONE = "nothing: its reward failed"
SAMPLE_WIDTH = 100
"""Characters of a prompt (its end) and of an answer (its beginning) in the panel."""
REDIS = {"hung": "hung: takes connections and does not answer", "away": "cannot be reached"}
"""Faults of Redis (`launcher.job.redis_pulse`), for people."""

_PHASE_STYLE = {
    Phase.TRAINING: "green", Phase.FINISHED: "bold green", Phase.FAILED: "bold red", Phase.PAUSED: "yellow",
}  # fmt: skip


@dataclass(slots=True)
class View:
    """Everything that is shown. `stage` is what the launcher is doing before the first status."""

    stage: str = "starting"
    status: JobStatus | None = None
    bound: int | None = None
    rewards: list[float] = field(default_factory=list)
    first_held_out: float | None = None
    processes: dict[str, str] = field(default_factory=dict)
    log_dir: str = ""
    elapsed: float = 0.0
    reachable: bool = True
    refusal: str = ""
    """Why the controller, which answers, cannot serve now."""
    redis: str = ""
    """The fault of Redis: hung, away; empty: none."""
    notice: str = ""
    stopping: bool = False
    """The job is being ended before its end: its processes save and leave."""
    sample: str = ""
    """The newest sample that is kept as text: what it was asked, answered and paid."""


def line(view: View) -> str:
    """The view as one line of `key=value`, keys always in the same order; unknown values are left out."""
    status = view.status
    if status is None:
        return one_line(f"phase=starting stage={_quoted(view.stage)} elapsed={view.elapsed:.0f}s")
    held_out, rewards = status.validation.value if status.validation else None, status.rewards
    failed = sum(rewards.failed.values()) if rewards else 0
    waits = rewards.wait_fraction or 0.0 if rewards else 0.0
    values: list[tuple[str, str | None]] = [
        ("phase", phase_of(view)),
        ("step", f"{status.step}/{status.total_steps}"),
        ("loss", number(status.metrics.get("loss")) if status.mode == "sft" else None),
        ("reward", number(status.reward)),
        ("held_out", number(held_out)),
        ("validated", "{}/{}".format(*status.validating) if status.validating else None),
        ("staleness", _staleness(view) if status.mode == "grpo" else None),
        ("samples_per_s", f"{status.samples_per_s:.1f}"),
        ("tokens_per_s", f"{status.tokens_per_s:.0f}"),
        ("queue", str(status.queue_ready) if status.mode == "grpo" else None),
        ("replicas", "+".join(f"{count}{role}" for role, count in sorted(status.replicas.items())) or "0"),
        *((f"idle_{role}", f"{share:.0%}") for role, share in sorted(status.idle.items())),
        ("trainers", _quoted(members_text(status))),
        ("eta", duration(status.eta_s) if status.eta_s is not None else None),
        ("redis", view.redis or None),
        ("controller", _quoted(view.refusal) if view.reachable else "unreachable"),
        ("notice", _quoted(view.notice)),
        ("rewards_failed", f"{failed}/{failed + rewards.scored}" if rewards and failed else None),
        ("waiting_for_rewards", f"{waits:.0%}" if waits >= WORTH_SHOWING else None),
        ("alarms", ",".join(alarm.name for alarm in status.alarms) or None),
        ("note", _quoted(status.note)),
        ("error", _quoted(status.last_error)),
    ]
    return one_line(" ".join(f"{key}={value}" for key, value in values if value is not None))


def _quoted(text: str | None) -> str | None:
    """Whatever it says, it ends where its quotes do."""
    return '"' + text.replace('"', "'") + '"' if text else None


class LinePacer:
    """Decides when a line is due: a pure function of the clock and of what was printed last."""

    def __init__(self) -> None:
        self._printed_at = float("-inf")
        self._shown: tuple[object, ...] | None = None

    def due(self, view: View, now: float) -> bool:
        """Whether to print now; True counts as printed."""
        status = view.status
        key: tuple[object, ...] = (view.stage.partition(":")[0],)
        if status is not None:
            key = (
                phase_of(view),
                status.step,
                status.validating,
                status.last_error,
                status.note,
                bool(view.notice),
                view.redis,
            )
        age = now - self._printed_at
        new_phase = self._shown is None or self._shown[0] != key[0]
        if not (new_phase or (key != self._shown and age >= LINE_EVERY) or age >= SIGN_OF_LIFE):
            return False
        self._printed_at, self._shown = now, key
        return True


def panel(view: View) -> RenderableType:
    """The view as a panel for the terminal."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    status = view.status
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in _rows(view):
        grid.add_row(name, value)
    title = Text("cosmos-launch") if status is None else Text(one_line(f"{status.name} · {status.job_id}"))
    style = "cyan" if status is None else _PHASE_STYLE.get(status.phase, "cyan")
    subtitle = Text(f"{duration(view.elapsed)} · Ctrl-C stops in order")
    return Panel(grid, title=title, subtitle=subtitle, border_style=style, padding=(0, 1))


def _rows(view: View) -> list[tuple[str, Text]]:
    from rich.text import Text

    status = view.status
    rows: list[tuple[str, Text]] = []
    if status is None:
        rows.append(("phase", Text(one_line(view.stage), style="cyan")))
    else:
        rows.append(("phase", Text(phase_of(view), style=_PHASE_STYLE.get(status.phase, "cyan"))))
        if text := sentence(view):
            rows.append(("now", Text(one_line(text))))
        rows += [(name, Text(one_line(value))) for name, value in _training_rows(view, status)]
    why_waiting = f"cannot serve now, the workers keep trying: {view.refusal}" if view.refusal else ""
    for name, style, value in (
        ("processes", "", "  ".join(f"{name} {state}" for name, state in view.processes.items())),
        ("redis", "yellow", REDIS.get(view.redis, "")),
        ("controller", "yellow", why_waiting if view.reachable else "does not answer; the workers keep trying"),
        ("stopping", "yellow", view.notice),
        ("note", "yellow", status.note if status else ""),
        *(("alarm", "yellow", alarm.text) for alarm in (status.alarms if status else [])),
        ("sample", "", view.sample),
        ("last error", "red", (status.last_error or "") if status else ""),
        ("logs", "", view.log_dir),
    ):
        if value:
            rows.append((name, Text(visible(value), style=style)))
    return rows


def phase_of(view: View) -> str:
    """The job's phase, or that it is stopping."""
    return "stopping" if view.stopping or view.status is None else str(view.status.phase)


def sentence(view: View) -> str:
    """Say what the job waits for, and for how long."""
    status = view.status
    if status is None or not status.sentence:
        return ""
    since = status.sentence_since
    waited = 0.0 if since is None or status.phase in TERMINAL_PHASES else status.updated_at - since
    return status.sentence + (f" (for {duration(waited)})" if waited >= 1 else "")


def sample_line(record: SampleRecord) -> str:
    """A sample in two short lines: what was asked, and what was answered and paid for it."""
    paid = FAILED_ONE if record.score is None else f"{record.score:.3g}"
    prompt, answer = (one_line(text.strip()) for text in (record.prompt, record.answer))
    prompt = prompt if len(prompt) <= SAMPLE_WIDTH else "…" + prompt[-SAMPLE_WIDTH:]
    answer = answer if len(answer) <= SAMPLE_WIDTH else answer[:SAMPLE_WIDTH] + "…"
    return f"step {record.step}, paid {paid}: {prompt}\n→ {answer}"


def _training_rows(view: View, status: JobStatus) -> list[tuple[str, str]]:
    eta = f"  {duration(status.eta_s)} left" if status.eta_s is not None else ""
    filled = round(BAR_WIDTH * min(1.0, status.step / max(1, status.total_steps)))
    bar = "━" * filled + "╌" * (BAR_WIDTH - filled)
    rows = [("step", f"{bar} {status.step}/{status.total_steps}{eta}")]
    if status.mode == "sft":
        rows.append(("loss", number(status.metrics.get("loss")) or "–"))
    else:
        rows.append(("reward", f"{number(status.reward) or '–'}  {sparkline(view.rewards, SPARK_WIDTH)}"))
    if status.validating:
        rows.append(("validating", "{} of {} samples".format(*status.validating)))
    if status.validation:
        before = "" if view.first_held_out is None else f"  (before: {view.first_held_out:.3f})"
        score = number(status.validation.value) or FAILED
        if status.validation.loss is not None:
            score = f"loss {score}, accuracy {number(status.validation.accuracy)}"
            score += f", score {number(status.validation.score_mean)}" if status.validation.is_completed else ""
        failed = f", {status.validation.errors} gradings failed" if status.validation.errors else ""
        held_out = f"{score} at version {status.validation.version}{before}{failed}"
        rows.append(("held-out", held_out))
    if status.mode == "grpo":
        rows.append(("staleness", _staleness(view).replace("/", " · ") + "  (mean · max · bound)"))
        rows.append(("queue", f"{status.queue_ready} ready, {status.outstanding} outstanding"))
        rows.append(("policy", _policy(status)))
    rows += [("rewards", text) for text in [rewards_text(status)] if text]
    if members := members_text(status):
        rows.append(("trainers", members))
    rows.append(("speed", f"{status.samples_per_s:.1f} samples/s, {status.tokens_per_s:.0f} tokens/s"))
    idle = ", ".join(f"{role} {share:.0%}" for role, share in sorted(status.idle.items()))
    replicas = ", ".join(f"{count} {role}" for role, count in sorted(status.replicas.items())) or "none yet"
    rows.append(("replicas", replicas + (f"  (idle: {idle})" if idle else "")))
    return rows


SHOWN_METRICS = (
    ("length", "response_tokens_mean", "{:.0f} tokens"),
    ("cut off", "truncated_fraction", "{:.0%}"),
    ("entropy", "entropy", "{:.3g}"),
    ("gradient", "grad_norm", "{:.3g}"),
    ("zero variance", "zero_variance_fraction", "{:.0%} of groups"),
    ("lr", "lr", "{:.3g}"),
)


def _policy(status: JobStatus) -> str:
    metrics = status.metrics
    return (
        ", ".join(f"{name} {form.format(metrics[key])}" for name, key, form in SHOWN_METRICS if key in metrics) or "–"
    )


def members_text(status: JobStatus) -> str:
    """List the trainers of one policy in one line; empty where one trainer is all there is to be."""
    members = status.members
    if members is None:
        return ""
    shares = [f"{m.replica_id} {m.parts} of {members.parts} parts" for m in members.members] or ["none yet"]
    shares[0] += " (leads)" if members.members else ""
    waiting = f"; {', '.join(members.waiting)} from one of the next steps on" if members.waiting else ""
    return f"{', '.join(shares)}{waiting}  (epoch {members.epoch})"


def rewards_text(status: JobStatus) -> str:
    """How rewards do, in one line; empty while none was asked for."""
    rewards = status.rewards
    if rewards is None or not (rewards.scored or rewards.failed or rewards.scoring):
        return ""
    failed = sum(rewards.failed.values())
    parts = [f"{rewards.scored} scored"]
    if rewards.attempt_seconds_mean is not None and rewards.attempt_seconds_mean >= WORTH_TELLING:
        parts[0] += f", {rewards.attempt_seconds_mean:.2f} s each"
    if failed:
        kinds = ", ".join(f"{kind} {count}" for kind, count in rewards.failed.items())
        timeouts = f", {rewards.timeouts} by time-outs" if rewards.timeouts else ""
        parts.append(f"{failed} failed{timeouts} ({kinds})")
    if rewards.retried:
        parts.append(f"{rewards.retried} times scored again")
    if rewards.scoring:
        parts.append(f"{rewards.scoring} in the pool, the oldest for {rewards.oldest_s:.0f} s")
    if rewards.wait_fraction is not None and rewards.wait_fraction >= WORTH_SHOWING:
        parts.append(f"engines waited {duration(rewards.wait_seconds)} ({rewards.wait_fraction:.0%}) for them")
    return "; ".join(parts)


def _staleness(view: View) -> str:
    status = view.status
    if status is None:
        return ""
    mean = "–" if status.staleness_mean is None else f"{status.staleness_mean:.1f}"
    return f"{mean}/{status.staleness_max}/{'–' if view.bound is None else view.bound}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a number as a row of blocks, averaged down to at most `width` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(_TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_TICKS[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as people write them: 48s, 3m07s, 2h05m, 3d04h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def number(value: float | None) -> str | None:
    """Three decimals; None for an unknown value."""
    return None if value is None else f"{value:.3f}"
