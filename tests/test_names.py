"""One word, one thing: what the table of `docs/architecture.md` says of words holds over all names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests import counts

TEXT = (counts.ROOT / "docs/architecture.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("## Words in names\n")[2].partition("\n## ")[0]
PLACES = {
    cells[0]: re.findall(r"`([^`]+)`", cells[2])
    for cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", SECTION, re.MULTILINE)
    if not cells[0].startswith(("word", "-"))
}
"""Word, or two words → the files and folders in which names have it."""
INSTEAD = dict(re.findall(r"\*(\w+)\* instead of ((?:`\w+`(?:, | or )?)+)", SECTION))
TWO_ENDS = set(re.findall(r"`(\w+)`", SECTION.partition("Two ends of one thing:")[2].partition(".\n")[0]))


def modules() -> dict[str, Path]:
    """File -> path of every module of the product, but of readers of other systems' files."""
    files = {str(path.relative_to(counts.ROOT)): path for path in counts.modules().values()}
    return {file: path for file, path in files.items() if not file.startswith(("schema/interop/", "convert/"))}


def names() -> Iterator[tuple[str, str]]:
    """(file, name) of every module, class and function."""
    for file, path in modules().items():
        yield file, path.stem
        for node in ast.walk(counts.tree(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node.name


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)}


def fault(file: str, name: str) -> str | None:
    """What is wrong with a name by the table; of the rows whose words it has, the one with most of them counts."""
    rows = [row for row in PLACES if set(row.split()) <= words(name)]
    row = max(rows, key=lambda row: len(row.split()), default=None)
    if row is None or any(file == place or file.startswith(f"{place}/") for place in PLACES[row]):
        return None
    return f"{file}: {name} has the word {row!r}"


def test_words_of_the_table_are_in_names_of_these_files_alone() -> None:
    assert [found for file, name in names() if (found := fault(file, name))] == []


def test_places_of_the_table_exist() -> None:
    assert [place for row in PLACES.values() for place in row if not (counts.ROOT / place).exists()] == []


def test_words_that_have_a_better_one_are_in_no_name() -> None:
    refused = {word for old in INSTEAD.values() for word in re.findall(r"`(\w+)`", old)}
    assert refused
    assert [(file, name) for file, name in names() if words(name) & refused] == []


def test_a_class_name_is_given_once() -> None:
    classes = Counter(
        node.name
        for path in modules().values()
        for node in counts.tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, n in classes.items() if n > 1} == TWO_ENDS
