"""docs/migrate.md is what the readers say."""

from __future__ import annotations

import pytest

from convert.document import PAGE, blocks, render, telling
from convert.engine.registry import readers


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert render(page) == page, "run `python -m convert.document`"


def test_no_kind_of_file_is_forgotten() -> None:
    there = set(blocks(PAGE.read_text("utf-8")))
    for reader in readers():
        shown = {kind for kind in reader.kinds if ("keys", f"{reader.system} {kind}") in there}
        shown_keys = {rule.key for kind in shown for rule in telling(reader.rules(kind))}
        for kind in reader.kinds:
            missing = {rule.key for rule in telling(reader.rules(kind))} - shown_keys
            assert not missing, f"{reader.system} {kind}: {sorted(missing)[:5]}"
        assert not reader.prose or ("prose", reader.system) in there
        if reader.unsupported.reasons:
            assert ("none", reader.system) in there
            assert ("method", reader.system) in there
            assert ("tables", reader.system) in there


def test_what_stands_between_markers_is_made_anew_and_the_rest_kept() -> None:
    page = "# Title\n\n<!-- nearest -->\nSTALE\n<!-- end -->\n\ntail\n"
    made = render(page)
    assert made.startswith("# Title\n\n<!-- nearest -->\n")
    assert made.endswith("<!-- end -->\n\ntail\n")
    assert "STALE" not in made
    assert render(made) == made


@pytest.mark.parametrize("marker", ["keys: verl", "none", "keys: nobody rl"])
def test_a_marker_that_means_nothing_is_an_error(marker: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        render(f"<!-- {marker} -->\n<!-- end -->")
