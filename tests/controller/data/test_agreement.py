"""The config's rules know the synthetic dataset without importing it: they must say the same as the generator."""

from __future__ import annotations

import pytest

from controller.data.errors import DataError
from controller.data.reading.synthetic import COLUMNS, SPLITS, AdditionOptions, read_options
from schema.config.rules import data as data_rules


def test_columns_splits_and_options_are_those_of_the_generator():
    assert set(COLUMNS) == data_rules._SYNTHETIC_COLUMNS
    assert data_rules._SYNTHETIC_SPLITS == SPLITS
    assert set(data_rules._SYNTHETIC_OPTIONS) == set(AdditionOptions.model_fields)


@pytest.mark.parametrize("name", [n for n, (kind, *_) in data_rules._SYNTHETIC_OPTIONS.items() if kind is not bool])
def test_bounds_are_those_of_the_generator(name: str):
    kind, least, most = data_rules._SYNTHETIC_OPTIONS[name]
    for value in (least, most):
        assert getattr(read_options({name: kind(value)}), name) == value
    with pytest.raises(DataError):
        read_options({name: kind(least) - 1})
