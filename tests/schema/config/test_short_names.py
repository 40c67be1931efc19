"""Names of reward functions as metrics have them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.config import short_names


@pytest.mark.parametrize(
    ("specs", "short"),
    [
        (["gsm8k", "format"], ["gsm8k", "format"]),
        (["/home/me/rewards.py:flaky"], ["flaky"]),
        (["a.py:right", "b.py:right", "b.py:long"], ["a.right", "b.right", "long"]),
        (["x/a.py:right", "y/a.py:right"], ["x.a.right", "y.a.right"]),
        (["rewards.py:format", "format"], ["rewards.format", "format"]),
    ],
)
def test_a_function_is_called_by_its_name(specs: list[str], short: list[str]) -> None:
    assert short_names(specs) == dict(zip(specs, short, strict=True))


names = st.text("ab", min_size=1, max_size=2)
specs = st.one_of(names, st.builds("{}.py:{}".format, st.lists(names, min_size=1, max_size=3).map("/".join), names))


@given(st.lists(specs, unique=True, max_size=8))
def test_no_two_functions_share_a_name(specs: list[str]) -> None:
    short = short_names(specs)
    assert list(short) == specs
    assert len(set(short.values())) == len(specs)
