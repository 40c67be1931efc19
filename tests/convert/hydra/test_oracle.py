"""Words and composition are Hydra's, for random ones of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from convert.hydra.compose import compose
from convert.hydra.words import BadWord, parse_word

pytestmark = pytest.mark.slow

HYDRA = Path(sys.prefix) / "hydra"
PIECES = [
    *("a", "b1", "x-y", "1", "0", "10", "1_000", "-3", "1e-6", "+.5", "3.", "inf", "NaN", "true", "False", "null"),
    *(
        " ",
        "  ",
        ",",
        ":",
        "=",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "\\",
        "\\\\",
        "\\,",
        "\\'",
        "/",
        "-",
        "+",
        ".",
        "$",
        "@",
    ),
    *("${a.b}", "${oc.env:X,y}", "(", ")", "~", "#", "é", "\t", "'a b'", '"q,r"', "''", "[1,2]", "{a: b, c: [1]}"),
]
GROUPS = ["g", "h", "g/k", "h/m"]
WORDS = [
    *("g=q", "h=p", "+g/k=p", "~g", "~h=p", "g@t=q", "+h@v=q", "x=5", "++x.n=5", "~x", "~t.u", "+t.n={a:1}"),
    *("t={n:2}", "g/k=q", "++y={z:{w:1}}", "x.y=1", "g=[p,q]"),
]


def by_hydra(cases: list[list[Any]]) -> list[Any]:
    """Hydra's answers to these cases."""
    command = [sys.executable, str(Path(__file__).with_name("hydra_oracle.py"))]
    assert (HYDRA / "hydra").is_dir(), "`make setup-hydra` installs what this is compared with"
    env = {**os.environ, "PYTHONPATH": str(HYDRA)}
    run = subprocess.run(command, input=json.dumps(cases), env=env, capture_output=True, text=True, check=True)
    answers: list[Any] = json.loads(run.stdout)
    return answers


def test_words_are_read_as_hydra_reads_them() -> None:
    draw = random.Random(5)
    words = {
        draw.choice(["", "+", "++", "~"])
        + draw.choice(["a", "a.b", "a/b", "a@b", "$a", "a.0"])
        + "="
        + "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 5))).strip()
        for _ in range(2500)
    }
    accepted = 0
    for word, answer in zip(words, by_hydra([["word", word] for word in words]), strict=True):
        try:
            read = parse_word(word)
        except BadWord:
            assert answer is None, word
            continue
        assert [str(read.act), read.key, read.package, repr(read.value)] == answer, word
        accepted += 1
    assert accepted > 400


def test_files_are_composed_as_hydra_composes_them(tmp_path: Path) -> None:
    draw = random.Random(7)
    cases = []
    for number in range(300):
        folder = tmp_path / str(number)
        write_file(draw, folder / "main.yaml", "", 0.9)
        write_file(draw, folder / "base.yaml", "/", 0.0)
        for group in GROUPS:
            for choice in "pq":
                write_file(draw, folder / group / f"{choice}.yaml", group, 0.25)
        cases.append(["compose", str(folder), "main", draw.sample(WORDS, draw.choice([0, 0, 1, 2]))])
    accepted = 0
    for (_, folder, name, words), answer in zip(cases, by_hydra(cases), strict=True):
        if answer is None:  # what Hydra refuses may be read here: the reverse matters
            continue
        composed = compose(Path(folder) / f"{name}.yaml", [parse_word(word) for word in words])
        assert json.dumps(composed.data) == json.dumps(answer), (folder, words)
        accepted += 1
    assert accepted > 60


def write_file(draw: random.Random, path: Path, group: str, listed: float) -> None:
    """A file with some keys and, with this probability, a list of defaults."""
    values: list[Any] = [1, 2, "a", [1, 2], {"x": 1}, {"y": {"z": 2}}, None, "${t}"]
    data = {draw.choice("xyzgt"): draw.choice(values) for _ in range(draw.randint(0, 3))}
    if draw.random() < listed:
        entries = [entry(draw, group) for _ in range(draw.randint(1, 4))]
        entries.sort(key=lambda item: "override" in str(item))
        if draw.random() < 0.6:
            entries.insert(
                0 if draw.random() < 0.5 else sum("override" not in str(item) for item in entries), "_self_"
            )
        data = {"defaults": entries, **data}
    header = "# @package " + draw.choice(["_global_", "w", "w.v"]) + "\n" if group and draw.random() < 0.2 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + (yaml.safe_dump(data, sort_keys=False) if data else ""))


def entry(draw: random.Random, group: str) -> Any:
    """One entry of a list of defaults of a file of this group."""
    package = draw.choice(["", "", "", "@t", "@t.u", "@_here_", "@_global_", "@_global_.v", "@_group_"])
    name = draw.choice(GROUPS) if not group else "/" + draw.choice(GROUPS)
    kind = draw.random()
    if kind < 0.15:
        return "/base" + package
    if kind < 0.25:
        return {f"override {name}": draw.choice("pq")}
    if kind < 0.35:
        return {f"{name}{package}": draw.choice([None, ["p", "q"], "???"])}
    if kind < 0.45 and not group:
        return {f"{name}{package}": "${" + draw.choice(["g", "h"]) + "}"}
    return {draw.choice(["", "", "optional "]) + f"{name}{package}": draw.choice(["p", "q", "q", "none"])}
