"""`benchmarks/learning/estimators.py` and the loop below it, on an untrained model for one step."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from benchmarks.learning.estimators import config_of, distinct, markdown, trained
from schema.config.algorithms import ESTIMATORS, LOSSES


def test_every_cell_is_a_sound_job(tiny_model: Path) -> None:
    for cell in product(ESTIMATORS, LOSSES):
        policy = config_of(cell, tiny_model, lag=2).grpo
        assert (policy.advantage_estimator, policy.variant) == cell


def test_losses_that_are_one_function_share_a_column() -> None:
    assert [name for name, first in distinct().items() if name != first] == ["dapo"]
    head, rule, *rows = markdown({("grpo", "grpo"): 0.895}).splitlines()
    assert head.startswith("| | `grpo`, `dapo` | `gspo` |")
    assert rule.count("|") == head.count("|") == rows[-1].count("|")
    assert rows[0].startswith("| `grpo` | 89.5 | ")
    assert len(rows) == len(ESTIMATORS)


@pytest.mark.parametrize("cell", [("remax", "reinforce"), ("gae", "grpo")], ids="-".join)
def test_a_cell_trains(cell: tuple[str, str], tiny_model: Path, tmp_path: Path) -> None:
    """One with a greedy sample, one with a critic; an untrained model is right by accident alone."""
    row = trained(cell, tiny_model, tmp_path, steps=1, lag=2)
    assert (row["estimator"], row["loss"]) == cell
    assert len(row["curve"]) == len(row["grad_norm"]) == 1
    assert 0 <= row["accuracy"] < 0.2
