"""The tables of engines, estimators and losses have each of them, and name options that exist."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

from policy_worker.algorithms.estimators import ESTIMATORS
from policy_worker.algorithms.losses import POLICY_LOSSES
from schema.config import GrpoConfig, algorithms
from schema.config.backends import BACKENDS, NOT_BUILT, RolloutBackend
from schema.config.sections.rollout import RolloutConfig


def test_every_engine_has_a_row_and_a_module() -> None:
    assert set(BACKENDS) == set(get_args(RolloutBackend))
    for name in BACKENDS:
        assert find_spec(f"rollout_worker.engines.{name}") is not None
    assert BACKENDS.keys().isdisjoint(NOT_BUILT)
    assert any(engine.repeats for engine in BACKENDS.values())


def test_what_an_engine_lacks_is_off_by_default() -> None:
    for engine in BACKENDS.values():
        for name, neutral in engine.lacks.items():
            assert RolloutConfig.model_fields[name].get_default(call_default_factory=True) == neutral


def test_estimators_and_losses_that_are_built_are_those_of_the_trainer() -> None:
    assert tuple(algorithms.ESTIMATORS) == get_args(algorithms.EstimatorName)
    assert tuple(algorithms.LOSSES) == get_args(algorithms.LossName)
    assert algorithms.ESTIMATORS.keys() == ESTIMATORS.keys()
    assert {name: row.loss_type for name, row in algorithms.LOSSES.items()} == {
        name: loss.loss_type or "" for name, loss in POLICY_LOSSES.items()
    }
    options = {option for row in algorithms.ESTIMATORS.values() for option in row.options}
    assert options <= GrpoConfig.model_fields.keys()
