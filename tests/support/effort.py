"""How hard a randomised proof tries: a little in every run, twenty times as hard in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

SOAK = os.environ.get("SOAK") == "1"


def examples(usual: int) -> int:
    """Examples, seeds or rounds of a test marked `scaled`: `usual`, in `make soak` twenty times as many."""
    return usual * 20 if SOAK else usual


def combinations(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values, to parametrise a test by.

    In every run as many as the longest axis has values, so that each value of each axis is met; the rest is `soak`.
    """
    usual = {tuple(i % len(axis) for axis in axes) for i in range(max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, chosen, strict=True)),
            marks=() if chosen in usual else pytest.mark.soak,
        )
        for chosen in product(*(range(len(axis)) for axis in axes))
    ]
