"""What a GPU run has found, as tables for docs/performance.md. The standard library alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import cell, table_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """A figure of a section's case, and what it should be. most: it should be less, else more."""

    words: str
    section: str
    figure: str
    value: float
    most: bool = True
    case: str = ""
    """The only case that counts; empty: the last one that has the figure, of training the best."""

    def reached(self, found: float) -> bool:
        return found <= self.value if self.most else found >= self.value


GOALS = (
    Goal("MFU of 1.5B, packed and compiled, at least 45 %", "training", "mfu", 0.45, most=False),
    *(
        Goal(f"log-probs and loss of width {width} in at most {words}", "logprobs", figure, value, case=case)
        for width, case in ((1536, "width 1536, fused"), (3584, "width 3584, fused"))
        for words, figure, value in (
            ("1/8 of the memory", "memory_ratio", 1 / 8),
            ("1.35 times the time", "time_ratio", 1.35),
        )
    ),
    Goal("training stands still for at most 60 ms for a delta of 1.5B", "publication", "pause_ms", 60.0),
    Goal("a delta of 1.5B encoded in at most 0.4 s", "publication", "encode_s", 0.4),
)


def goals(rows: Mapping[str, list[Row]]) -> list[Row]:
    """Each goal with its figure, in its case; else in the last case of its section, of training in the best."""
    found = []
    for goal in GOALS:
        cases = [row for row in rows.get(goal.section, []) if goal.case in ("", row["case"])]
        values = [row[goal.figure] for row in cases if isinstance(row.get(goal.figure), float)]
        value = None
        if values:
            value = max(values) if goal.section == "training" else values[-1]
        found.append({"goal": goal.words, "found": value, "reached": None if value is None else goal.reached(value)})
    return found


def markdown(
    where: Row, command: str, titles: Mapping[str, str], rows: Mapping[str, list[Row]], reached: Iterable[Row]
) -> str:
    """Tables of all sections, in the order of their titles."""
    versions = f"Python {where['python']}, PyTorch {where['torch']}"
    lines = [f"`{command}`, {where['date']}, {where['gpu'] or 'no GPU'}, {where['cores']} cores, {versions}"]
    lines += ["", "| goal | found | reached |", "|---|---|---|"]
    for goal in reached:
        mark = {None: "not measured", True: "yes", False: "no"}[goal["reached"]]
        lines.append(f"| {goal['goal']} | {cell(goal['found'])} | {mark} |")
    for name, title in titles.items():
        if name in rows:
            *found, whole = rows[name]
            took = f"`{name}`, {whole['seconds_s']:.0f} s"
            lines += ["", f"**{title}** ({took})", *_section(found)]
    return "\n".join(lines) + "\n"


def _section(rows: Sequence[Row]) -> list[str]:
    """What went well without a figure in one line, then a table for each set of figures."""
    plain = ("section", "case", "status", "why")
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        figures = tuple(key for key in row if key not in plain)
        groups.setdefault(figures if figures or row["status"] == "ok" else ("why",), []).append(row)
    lines = []
    if right := groups.pop((), []):
        lines += ["", "Right: " + "; ".join(row["case"] for row in right)]
    for figures, group in groups.items():
        columns = ["case", "status", *figures]
        lines += ["", table_of(["case", "result", *figures], [[row.get(name) for name in columns] for row in group])]
    return lines
