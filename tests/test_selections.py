"""`make unit` and `make e2e` together run every test, each once; the long proofs are those of `make soak`."""

from __future__ import annotations

import ast
import re
from itertools import combinations
from pathlib import Path

from _pytest.mark.expression import Expression

from tests.conftest import MARK, OF_ALL

ROOT = Path(__file__).parent.parent
MARKS = ("slow", "e2e", "soak")
FAST, SLOW = re.findall(r'\$\(BIN\)/pytest (.*?)-m "(.*?)"', (ROOT / "Makefile").read_text())
FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_a_test_with_any_marks_is_in_one_selection() -> None:
    for marks in (set(some) for n in range(len(MARKS) + 1) for some in combinations(MARKS, n)):
        selected = [
            Expression.compile(which).evaluate(lambda name, /, have=marks, **_: name in have)
            for _, which in (FAST, SLOW)
        ]
        assert sum(selected) == ("soak" not in marks), marks


def test_what_one_selection_ignores_is_wholly_in_the_other() -> None:
    ignored = re.findall(r"--ignore (\S+)", FAST[0])
    assert "--ignore" not in SLOW[0]
    for path in (path for folder in ignored for path in (ROOT / folder).glob("**/test_*.py")):
        certain = {mark for line in OF_ALL.findall(path.read_text()) for mark in MARK.findall(line)}
        assert certain & {"slow", "e2e", "soak"}, f"{path.name} has no pytestmark"


def test_every_test_is_collected_and_its_marks_stand_in_its_own_file() -> None:
    """`tests.conftest` reads the marks of a file before it imports it: those of a base class elsewhere it misses."""
    marked, strays = set(), []
    for path in FILES:
        text = path.read_text()
        has = any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            for node in ast.walk(ast.parse(text))
        )
        if not path.name.startswith("test_") and has:
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            takers = [file for file in FILES if file.name.startswith("test_") and module in file.read_text()]
            strays += [] if takers else [module]
            marked |= {module} if set(MARK.findall(text)) - {"scaled"} else set()
    assert strays == [], "tests that pytest does not collect"
    assert marked == set(), "tests that others inherit, with marks that those do not show"
