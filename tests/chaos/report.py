"""The table at the end, and the report that is kept: Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.chaos.job import Kill, Verdict
from tests.chaos.plan import ROLES


def table(verdicts: Sequence[Verdict]) -> str:
    """Kills by role: how many, what became of their jobs, and how long until the next committed step."""
    lines = [
        "| killed | kills | jobs it struck | of these whole | next committed step (median) | after a single "
        "fault | longest |",
        "|---|---|---|---|---|---|---|",
    ]
    for role in ROLES:
        struck = [verdict for verdict in verdicts if any(kill.role == role for kill in verdict.kills)]
        if struck:
            lines.append(_row(role, struck, role))
    lines.append(_row("**all**", verdicts, None))
    return "\n".join(lines)


def _row(name: str, struck: Sequence[Verdict], role: str | None) -> str:
    whole = sum(not verdict.violations for verdict in struck)
    kills = [kill for verdict in struck for kill in verdict.kills if role in (kill.role, None)]
    waits = [kill.recovery for kill in kills if kill.recovery is not None]
    single = [
        kill.recovery
        for verdict in struck
        for kill in verdict.kills
        if role in (kill.role, None) and kill.recovery is not None and is_single(kill, verdict.kills)
    ]
    cells = (len(kills), len(struck), whole, _median(waits), _median(single), _seconds(max(waits, default=None)))
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def is_single(kill: Kill, kills: Sequence[Kill]) -> bool:
    """Whether the job had got over every earlier kill, and no other came before the next committed step."""
    assert kill.recovery is not None
    return not any(
        other is not kill
        and other.at <= kill.at + kill.recovery
        and (other.recovery is None or other.at + other.recovery >= kill.at)
        for other in kills
    )


def report(verdicts: Sequence[Verdict], command: str, seconds: float, *, complete: bool) -> str:
    """The whole report. `seconds`: how long it all took."""
    kills = [kill for verdict in verdicts for kill in verdict.kills]
    keepers = sum(kill.target.startswith("keeper") for kill in kills)
    last = [kill for kill in kills if kill.recovery is None]
    double = sum(
        later.at - earlier.at < 1.0
        for verdict in verdicts
        for earlier, later in zip(verdict.kills, verdict.kills[1:], strict=False)
    )
    violations = [f"- job {verdict.plan.seed}: {text}" for verdict in verdicts for text in verdict.violations] or [
        "None."
    ]
    parts = [
        "# Chaos report",
        f"`{command}`: {len(kills)} kills in {len(verdicts)} jobs, {seconds / 60:.0f} minutes"
        + ("." if complete else " (interrupted)."),
        table(verdicts),
        f"{double} kills came within a second of the one before, {keepers} hit the keeper above a process, "
        f"{len(last)} came after the last committed step of their job (they have no time above). Training went "
        f"back to a checkpoint {sum(verdict.rewinds for verdict in verdicts)} times; "
        f"{sum(verdict.dropped for verdict in verdicts)} prompts were dropped.",
        "## Violations",
        "\n".join(violations),
    ]
    return "\n\n".join(parts) + "\n"


def _median(waits: Sequence[float]) -> str:
    return _seconds(median(waits)) if waits else "–"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
