"""Counts of the house: `python -m tests.counts` prints them; `tests/test_house.py` holds those that matter.

`--cpu` runs what a target of the Makefile runs, `test` or the one that follows, and prints what it costs: seconds of
CPU, user and system, of all its processes, and those by test file. A path that follows instead is given to pytest.

roots       modules that lie flat in a package (entry points and little else)
crowded     folders with more than FULL modules; those of the config's keys and rules are exempt
lonely      modules under SMALL lines that only one other module imports: usually they belong into it
long        functions over LONG lines
circles     files that import each other, directly or through others, type imports and late imports included
openings    docstrings, and strings below constants, that begin as a fragment: "Of the last step"
english     phrases that an engineer of the field would not write, docstrings, messages and docs alike
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

from cosmos_launch import PACKAGES
from tests.support.cpu import measured

ROOT = Path(__file__).parent.parent
EXEMPT = "schema/config/"
FULL, SMALL, LONG = 15, 100, 80
PHRASES = {phrase: re.compile(rf"\b{phrase}\b") for phrase in ("is no", "beside", "told")}
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w.]+))", re.MULTILINE)
FRAGMENT = re.compile(r"\s*(As|Of|That|Those|What|Who|Whose)\b")
GENERATED = {"docs/config.md", "docs/migrate.md"}


@cache
def modules() -> dict[str, Path]:
    """Name -> file of every module of the product; a package is named like its folder."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """The modules of ours that a file names in its imports, wherever they stand."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def importers() -> Counter[str]:
    """Module -> how many other modules of the product import it."""
    found: Counter[str] = Counter()
    for name, path in modules().items():
        found.update({target for target in imports(path) if target in modules()} - {name})
    return found


def files() -> dict[str, Path]:
    """Name -> file of every module of the product, of the tests and of the benchmarks."""
    others = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in others}
    return modules() | {name.removesuffix(".__init__"): path for name, path in named.items()}


def circles() -> list[set[str]]:
    """The sets of modules of which each imports all others, directly or through others."""
    known = files()
    needs = {name: _needs(path, known.keys()) - {name} for name, path in known.items()}
    while leaves := {name for name, needed in needs.items() if not needed}:  # which are in no circle
        needs = {name: needed - leaves for name, needed in needs.items() if name not in leaves}
    reached = {name: _reached(name, needs) for name in needs}
    sets = {frozenset(n for n in reached[name] if name in reached[n]) for name in needs}
    return sorted((set(names) for names in sets if names), key=sorted)


def _needs(path: Path, known: Collection[str]) -> set[str]:
    """The modules that a file imports; of `from package import module` the module alone."""
    needed: set[str] = set()
    for package, names, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        whole = {f"{package}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", names)}
        needed |= {name if name in known else package for name in whole} | {plain}
    return needed.intersection(known)


def _reached(name: str, needs: Mapping[str, set[str]]) -> set[str]:
    """The modules that one needs, directly or through others."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        new = needs[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def roots() -> list[str]:
    return [name for name, path in modules().items() if path.parent.parent == ROOT and path.name != "__init__.py"]


def crowded() -> dict[str, int]:
    """Folder of the product or of the benchmarks -> modules, where there are more than FULL."""
    folders = Counter(
        str(path.parent.relative_to(ROOT))
        for name, path in files().items()
        if path.name != "__init__.py" and not name.startswith("tests.")
    )
    return {folder: n for folder, n in folders.items() if n > FULL and not f"{folder}/".startswith(EXEMPT)}


def lonely() -> list[str]:
    """Modules under SMALL lines with one importer."""
    count = importers()
    leaves = {name: path for name, path in modules().items() if path.name not in ("__init__.py", "__main__.py")}
    return [name for name, path in leaves.items() if count[name] == 1 and lines(path) < SMALL]


def long() -> dict[str, int]:
    """Function -> lines, where there are more than LONG."""
    return {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONG
    }


def openings() -> list[str]:
    """`module: opening` of every docstring, and every string below a constant, that is a fragment."""
    return [
        f"{name}: {node.value.value.splitlines()[0]}"
        for name, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and FRAGMENT.match(node.value.value)
    ]


def english() -> dict[str, int]:
    """Phrase -> how often it stands in the product and its docs."""
    docs = [path for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in GENERATED]
    texts = [path.read_text(encoding="utf-8") for path in (*modules().values(), *docs, ROOT / "README.md")]
    return {phrase: sum(len(pattern.findall(text)) for text in texts) for phrase, pattern in PHRASES.items()}


def cpu(what: str) -> int:
    """Run a target of the Makefile, or the tests of a path, and print its CPU seconds; its exit code."""
    path = (ROOT / what.partition("::")[0]).exists() and what.startswith("tests")
    code, total, by_file = measured(*((sys.executable, "-m", "pytest", what) if path else ("make", what)))
    for name, seconds in by_file.most_common():
        print(f"{seconds:9.1f}  {name}")
    print(f"{by_file.total():9.1f}  in tests\n{total:9.1f}  CPU seconds, user + system, with children")
    return code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.counts", description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", nargs="?", const="test", metavar="TARGET", help="measure a run of the tests")
    if what := parser.parse_args().cpu:
        sys.exit(cpu(what))
    for package in (*PACKAGES, "all"):
        own = [path for name, path in modules().items() if name.split(".")[0] == package or package == "all"]
        folders = PACKAGES if package == "all" else (package,)
        rows = sum(lines(path) for folder in folders for path in (ROOT / folder).rglob("*.txt"))
        print(f"{package:15} {len(own):4} modules  {sum(map(lines, own)):6} lines {rows:6} rows of tables")
    print(f"\nin package roots: {len(roots())}\ncrowded folders: {crowded() or 'none'}")
    print(f"small modules with one importer: {len(lonely())}", *lonely(), sep="\n    ")
    print(f"functions over {LONG} lines: {len(long())}", *(f"{k}: {n}" for k, n in long().items()), sep="\n    ")
    begins = Counter(opening.partition(".")[0] for opening in openings())
    print(f"docstrings that begin as a fragment: {begins.total()}", dict(begins))
    print("circles of files:", *map(sorted, circles()), sep="\n    ")
    print("phrases: " + ", ".join(f"{phrase!r} {n}" for phrase, n in english().items()))


if __name__ == "__main__":
    main()
