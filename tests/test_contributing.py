"""CONTRIBUTING.md is correct: its paths exist; its examples, applied to a copy of the tree, pass their tests."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import AREAS as AREAS_OF_SOAK

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
AREAS = {path.name for path in ROOT.iterdir() if path.is_dir()}
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "outputs", "images")


def section(title: str) -> str:
    """The text below a heading, to the next one of its level or above."""
    level = TEXT[: TEXT.index(f" {title}\n")].rpartition("\n")[2]
    _, _, rest = TEXT.partition(f"{level} {title}\n")
    return re.split(rf"^#{{1,{len(level)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


EXAMPLES = {
    title.strip(): re.findall(r"```diff\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^### (An? .*?)\n(.*?)(?=^##|\Z)", section("How to add"), re.MULTILINE | re.DOTALL)
}


Hunk = tuple[str, str]
"""(lines that are there, lines that take their place); ("", lines) is appended."""


def changes(diff: str) -> dict[str, list[Hunk]]:
    """File -> its hunks. Lines without a mark name files; `@@` begins a further hunk."""
    found: dict[str, list[Hunk]] = {}
    for file, body in re.findall(r"^(\w[\w/.]+)\n((?:[-+ @].*\n|\n)*)", diff, re.MULTILINE):
        for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE):
            lines = hunk.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
            found.setdefault(file, []).append((old, new))
    return found


def test_every_extension_point_has_an_example_with_a_test() -> None:
    kinds = {
        "An estimator",
        "A loss",
        "A reward",
        "An engine",
        "A config key",
        "A key of another system",
        "A REST route",
        "A tracker",
        "An alarm",
    }
    assert set(EXAMPLES) == kinds
    for title, diffs in EXAMPLES.items():
        assert len(diffs) == 1, title
        assert any(file.startswith("tests/") for file in changes(diffs[0])), title


def applied() -> dict[str, str]:
    """File -> its text with all examples applied."""
    texts: dict[str, str] = {}
    for title, (diff,) in EXAMPLES.items():
        for file, hunks in changes(diff).items():
            for old, new in hunks:
                if file not in texts:
                    texts[file] = (ROOT / file).read_text("utf-8") if (ROOT / file).exists() else ""
                found = texts[file].count(old) if old else 1
                assert found == 1, f"{title}: {file} has these lines {found} times:\n{old}"
                if old:
                    texts[file] = texts[file].replace(old, new)
                else:
                    texts[file] += f"\n\n{new}" if texts[file] else new
    return texts


def test_the_worked_examples_can_be_applied() -> None:
    assert len(applied()) >= 2 * len(EXAMPLES)


HELD_BY = (
    "advantage_estimator",
    "capacity_and_name",
    "in_the_table_of_roles",
    "controller_has_every_call",
    "has_a_recipe",
)
"""Tests that hold what an example must not forget."""


@pytest.mark.slow
def test_the_worked_examples_work(tmp_path: Path) -> None:
    copy, texts = tmp_path / "tree", applied()
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED, symlinks=True)
    for file, text in texts.items():
        (copy / file).write_text(text, "utf-8")
    tests = {file for file in texts if file.rpartition("/")[2].startswith("test_")}
    tests |= {"tests/liveness/test_liveness.py", "tests/security/test_routes.py", "tests/test_house.py"}
    tests.add("tests/examples/test_recipes.py")

    def run(*argv: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(copy)}
        done = subprocess.run(
            [sys.executable, "-m", *argv], cwd=copy, env=env, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = sorted(file for file in texts if file.endswith(".py"))
    run("ruff", "check", *python)
    run("ruff", "format", "--check", *python)
    added = [re.findall(r"^\+(?:async )?def (\w*added\w*)", diff, re.MULTILINE) for (diff,) in EXAMPLES.values()]
    assert all(added), "an example adds no test, and no observer of a probe, that has `added` in its name"
    report = run("pytest", "-rp", "-p", "no:cacheprovider", "-k", " or ".join(("added", *HELD_BY)), *sorted(tests))
    passed = [line for line in report.splitlines() if line.startswith("PASSED")]
    for name in (*HELD_BY, *itertools.chain(*added)):
        assert any(name in line for line in passed), f"{name} did not run:\n{report}"


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_answers_to_where_are_there() -> None:
    """`path` or `path: name`; a name is defined in that file."""
    questions = rows("Where is it?")
    assert len(questions) >= 20
    for question, answer in questions:
        for path, name in re.findall(r"`([\w./]+?)(?:: ([\w.]+))?`", answer):
            file = ROOT / path
            assert file.exists(), f"{question} {path}"
            for part in name.split("."):
                defined = rf"^\s*(?:async )?(?:def|class) {part}\b|^\s*{part}\b.*[:=]"
                assert not part or re.search(defined, file.read_text("utf-8"), re.MULTILINE), (
                    f"{question} {path}: {name}"
                )


def test_each_area_of_long_proofs_stands_next_to_a_promise() -> None:
    assert set(re.findall(r"make soak AREA=(\w+)", section("Tests"))) == set(AREAS_OF_SOAK)


def test_paths_that_it_names_exist() -> None:
    text = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for path in re.findall(r"`((?:\w+/)+[\w.]*)`", text):
        if path.split("/")[0] in AREAS:
            assert (ROOT / path).exists(), path
