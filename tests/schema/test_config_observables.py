"""Every key names what it changes and where it is read, and the names are right."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from schema.config import UNAVAILABLE
from schema.config.keys import leaf_keys, section_keys
from schema.config.reference.observables import OBSERVABLES, Kind, observable, refused_by

ROOT = Path(__file__).parents[2]


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_every_key_has_an_observable() -> None:
    nothing = [key for key in leaf_keys() if key not in OBSERVABLES and refused_by(key) is None]
    assert nothing == [], "name what these keys change in schema/config/reference/observable_table.py"


def test_only_keys_of_the_schema_are_named() -> None:
    assert OBSERVABLES.keys() <= set(leaf_keys())
    assert set(leaf_keys()).isdisjoint(section_keys())


def test_what_is_refused_whole_has_no_entry() -> None:
    """A key in both tables has values that act beside those that are refused."""
    both = {key for key in OBSERVABLES if refused_by(key) is not None}
    for key in both:
        row = UNAVAILABLE[key]  # its own row: a table around it would refuse all of its values
        assert len(row.neutral) > 1 or row.when is not UNAVAILABLE["train.compile"].when, key


@pytest.mark.parametrize("key", leaf_keys())
def test_an_observable_says_what_and_of_what_kind(key: str) -> None:
    found = observable(key)
    assert found.kind in get_args(Kind)
    assert found.sentence.endswith(".")
    assert bool(found.read_in) == (key in OBSERVABLES)


@pytest.mark.parametrize("key", OBSERVABLES)
def test_the_named_modules_read_the_key(key: str) -> None:
    found = OBSERVABLES[key]
    names = found.reads.split("|") if found.reads else [key.rpartition(".")[2]]
    for file in found.read_in:
        assert any(re.search(rf"\b{name}\b", text_of(file)) for name in names), file


def test_properties_that_stand_for_keys_exist() -> None:
    source = "".join(
        text_of(f"schema/config/{name}.py") for name in ("root", "train", "train_policy", "dataset")
    )
    for entry in OBSERVABLES.values():
        for name in filter(None, entry.reads.split("|")):
            assert f"def {name}(self)" in source, name


def test_an_unknown_key_has_none() -> None:
    with pytest.raises(KeyError):
        observable("train.optm_lrr")
