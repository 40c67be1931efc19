"""Every key says what it changes or what it lacks, and stands in one place."""

from __future__ import annotations

from typing import get_args

import pytest

from schema.config import UNAVAILABLE
from schema.config.availability import refused_by
from schema.config.key import Kind
from schema.config.keys import acting_keys, leaf_keys, observable, section_keys


def test_keys_and_sections_are_different() -> None:
    assert set(leaf_keys()).isdisjoint(section_keys())


def test_every_key_says_what_it_changes_or_what_it_lacks() -> None:
    silent = [key for key in leaf_keys() if key not in acting_keys() and refused_by(key) is None]
    assert silent == [], "declare these keys with `acts`, or with `unbuilt`"
    for key in leaf_keys():
        found = observable(key)
        assert found.kind in get_args(Kind), key
        assert found.sentence.endswith("."), key


def test_what_is_refused_whole_does_not_act() -> None:
    """A key that acts and is refused has values that act next to those that are refused."""
    for key in acting_keys():
        if refused_by(key) is not None:
            row = UNAVAILABLE[key]  # its own row: a section around it would refuse all of its values
            assert len(row.neutral) > 1 or row.only, key


def test_an_unknown_key_has_no_observable() -> None:
    for key in ("train.optm_lrr", "train"):
        with pytest.raises(KeyError):
            observable(key)
