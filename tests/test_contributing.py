"""CONTRIBUTING.md is correct: its paths exist; its examples, applied to a copy of the tree, pass their tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    for title, body in re.findall(
        r"^### (An? .*?)\n(.*?)(?=^##|\Z)", section("How to add"), re.MULTILINE | re.DOTALL
    )
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
    kinds = {"An estimator", "A loss", "A reward", "An engine", "A config key", "A REST route"}
    assert set(EXAMPLES) == kinds
    for title, diffs in EXAMPLES.items():
        assert len(diffs) == 1, title
        assert any(file.startswith("tests/") for file in changes(diffs[0])), title


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all examples applied."""
    copy = tmp_path_factory.mktemp("contributing") / "tree"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED, symlinks=True)
    for title, (diff,) in EXAMPLES.items():
        for file, hunks in changes(diff).items():
            path = copy / file
            for old, new in hunks:
                text = path.read_text("utf-8") if path.exists() else ""
                assert not old or text.count(old) == 1, (
                    f"{title}: {file} has these lines {text.count(old)} times:\n{old}"
                )
                text = text.replace(old, new) if old else f"{text}\n\n{new}" if text else new
                path.write_text(text, "utf-8")
    return copy


@pytest.mark.slow
def test_the_worked_examples_work(changed: Path) -> None:
    touched = {file for (diff,) in EXAMPLES.values() for file in changes(diff)}
    tests = {file for file in touched if file.rpartition("/")[2].startswith("test_")} | {
        "tests/liveness/test_liveness.py"
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "added", *sorted(tests)],
        cwd=changed, env={**os.environ, "PYTHONPATH": str(changed)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(EXAMPLES) + 1} passed" in done.stdout, done.stdout


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


def test_paths_that_it_names_exist() -> None:
    text = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    for path in re.findall(r"`((?:\w+/)+[\w.]*)`", text):
        if path.split("/")[0] in AREAS:
            assert (ROOT / path).exists(), path
