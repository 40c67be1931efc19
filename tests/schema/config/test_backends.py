"""The table of engines covers every engine, and names options that there are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

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
