"""The table of `docs/security.md` that says who proves what to whom: each row has a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 7


def rows() -> list[list[str]]:
    """The cells of each row."""
    text = (ROOT / "docs/security.md").read_text("utf-8")
    section = text.partition("\n## Who proves what to whom\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_row_is_whole_and_names_a_test_that_is_there() -> None:
    assert len(rows()) >= 25
    for cells in rows():
        assert len(cells) == COLUMNS, cells
        who, _, proof, gets, *_, tests = cells
        assert "→" in who
        assert proof, who
        assert gets, who
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named, f"{who}: no test"
        for name in named:
            file, _, function = name.partition(": ")
            content = (ROOT / file).read_text("utf-8")
            assert re.search(rf"^(async )?def {function or 'test_'}", content, re.MULTILINE), name
