"""`docs/config.md` is up to date and says of every key what a reader has to know."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from convert.hints import names_elsewhere
from schema.config import UNAVAILABLE
from schema.config.keys import acting_keys, deviation_of, leaf_keys, observable, published_keys, section_keys
from schema.config.reference.document import FILE_NAME, document
from schema.config.reference.lookup import all_infos
from tests.support.each import check_each

ROOT = Path(__file__).parents[4]
COLUMNS = 7
SOURCE, OBSERVABLE, MEANING = -1, -2, -3


@cache
def rows() -> dict[str, list[list[str]]]:
    """The cells of each key's rows (two, where the kinds of jobs differ)."""
    found: dict[str, list[list[str]]] = {}
    section = ""
    for line in document().split("\n"):
        if heading := re.match(r"## `\[+([^\]]*)\]+`", line):
            section = heading[1] + "."
        elif line.startswith("## Outside"):
            section = ""
        elif name := re.match(r"\| `(\w+)`[^|]*\|", line):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))]
            found.setdefault(section + name[1], []).append(cells)
    return found


def test_the_file_is_up_to_date() -> None:
    written = (ROOT / FILE_NAME).read_text(encoding="utf-8")
    assert written == document(), "run `make schema`"


def test_every_key_has_a_row_and_every_section_a_heading() -> None:
    assert rows().keys() == set(leaf_keys())
    assert sum(map(len, rows().values())) == len(list(all_infos()))
    text = document()
    for key in section_keys():
        assert f"## `[{key}]`" in text or f"## `[[{key}]]`" in text
        assert f"](#{key.replace('.', '')})" in text


def test_rows_are_whole() -> None:
    check_each(leaf_keys(), _check_row)


def _check_row(key: str) -> None:
    for cells in rows()[key]:
        assert len(cells) == COLUMNS
        assert all(cells[number] for number in (0, 1, 2, 4, 5, 6)), cells
        found = observable(key)
        assert cells[OBSERVABLE].startswith(found.kind)
        assert ("*Not yet:* this build" in cells[MEANING]) == (key not in acting_keys() or key in UNAVAILABLE)
        assert ("*Deviation:*" in cells[MEANING]) == (deviation_of(key) is not None)


def test_sources_are_those_of_the_tables() -> None:
    published = set(published_keys())
    for key, found in rows().items():
        source = found[0][SOURCE]
        assert source.startswith("cosmos-rl") or key not in published
        for system, names in names_elsewhere().get(key, {}).items():
            assert f"{system} `{names[0]}`" in source
        assert (source == "ours") == (key not in published and key not in names_elsewhere())


def test_names_of_other_systems_are_many() -> None:
    """The tables of the readers are found: most keys of verl and ROLL that the pages name lead here."""
    systems = [system for names in names_elsewhere().values() for system in names]
    assert systems.count("verl") > 150
    assert systems.count("ROLL") > 80
