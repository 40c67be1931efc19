"""The table that goes into the documentation."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.job import Kill, Verdict
from tests.chaos.plan import JobPlan, Role
from tests.chaos.report import report, table


def kill(role: Role, at: float, recovery: float | None, target: str = "") -> Kill:
    return Kill(role, target or f"{role} 1", "progress", at, at, 3, "training", recovery)


def verdict(*kills: Kill, violations: tuple[str, ...] = ()) -> Verdict:
    return Verdict(JobPlan(7000, 1, ()), list(kills), list(violations), 60.0, 1, 0, Path())


def test_the_table_counts_by_role() -> None:
    whole = verdict(kill("policy", 10.0, 8.0), kill("redis", 30.0, 1.0), kill("policy", 40.0, 20.0),
                    kill("reward", 40.5, 19.5), kill("launcher", 90.0, None))  # fmt: skip
    broken = verdict(kill("redis", 5.0, 3.0), violations=("a step was lost",))
    rows = table([whole, broken]).splitlines()
    assert "| redis | 2 | 2 | 1 | 2.0 s | 2.0 s | 3.0 s |" in rows
    assert "| policy | 2 | 1 | 1 | 14.0 s | 8.0 s | 20.0 s |" in rows
    assert "| launcher | 1 | 1 | 1 | – | – | – |" in rows
    assert rows[-1].startswith("| **all** | 6 | 2 | 1 |")


def test_the_report_says_what_was_run_and_what_was_lost() -> None:
    struck = verdict(kill("redis", 5.0, 1.0), kill("redis", 5.5, 1.0, "keeper of redis 4"))
    text = report([struck], "python -m tests.chaos --seed 7", 120.0, complete=True)
    assert "`python -m tests.chaos --seed 7`: 2 kills in 1 jobs, 2 minutes." in text
    assert "1 kills came within a second" in text
    assert "1 hit the keeper" in text
    assert text.endswith("## Violations\n\nNone.\n")
    lost = report([verdict(violations=("a step was lost",))], "x", 1.0, complete=False)
    assert "- job 7000: a step was lost" in lost
    assert "(interrupted)" in lost
