"""The names of metrics that docs/metrics.md defines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STEP, NEXT, GAUGES, SCRAPED = (
    "Metrics of a step",
    "Next to the metrics of a step",
    "Gauges of replicas",
    "GET /metrics",
)


@cache
def documented(section: str) -> frozenset[str]:
    """The names of a section's tables, with * in the place of each <word>, and without labels."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"{PAGE} has no section {section}"
    rows = [line.removeprefix("| ").partition(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.partition(" of ")[0])]
    return frozenset(re.sub(r"<\w+>", "*", name.partition("{")[0]) for name in names)


def undocumented(names: Iterable[str], section: str = STEP) -> set[str]:
    """Those that no row defines."""
    known = documented(section)
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in known)}


def undocumented_families(text: str) -> set[str]:
    """The same of an answer of GET /metrics."""
    found = re.findall(r"^(cosmos_\w+?)(?:_bucket|_count|_sum|_created)?(?:\{.*)? \S+$", text, re.MULTILINE)
    assert found, text
    return undocumented(found, SCRAPED)
