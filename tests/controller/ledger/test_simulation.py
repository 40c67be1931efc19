"""Random schedules against the ledger: whatever crashes, nothing is lost, trained twice, or too old."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.ledger.values import LedgerParams
from tests.controller.ledger.simulation import Simulation
from tests.support.effort import examples


@st.composite
def jobs(draw: st.DrawFn) -> LedgerParams:
    bound = draw(st.integers(0, 4))
    fields: dict[str, Any] = {
        "groups_per_step": draw(st.integers(1, 4)), "n_samples": draw(st.integers(1, 3)),
        "greedy": draw(st.booleans()),
        "staleness_bound": bound, "n_positions": draw(st.integers(1, 25)),
        "data_passes": draw(st.integers(1, 2)), "max_steps": draw(st.none() | st.integers(1, 6)),
        "max_attempts": draw(st.integers(2, 6)), "oversample": draw(st.sampled_from([1.0, 1.0, 1.5])),
        "on_reward_error": draw(st.sampled_from(["retry", "mask", "drop"])),
        "filter_metrics": draw(st.sampled_from([(), ("r",)])), "keep_payloads": True,
        "keep_recent": draw(st.sampled_from([0, 3, 512])),
    }  # fmt: skip
    return LedgerParams(**fields)


@pytest.mark.scaled
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 1.0, 3.0]))
def test_any_schedule_keeps_the_invariants_and_ends(
    params: LedgerParams, seed: int, n_replicas: int, chaos: float
) -> None:
    Simulation(seed, params, n_replicas).run(chaos)


@pytest.mark.parametrize(
    "bound", [pytest.param(0, marks=pytest.mark.soak), 1, pytest.param(4, marks=pytest.mark.soak)]
)
def test_a_long_job_under_constant_failures(bound: int) -> None:
    params = LedgerParams(groups_per_step=4, n_samples=2, staleness_bound=bound, n_positions=200, keep_payloads=True)
    simulation = Simulation(seed=bound, params=params, n_replicas=3)
    simulation.run(chaos=1.0, max_events=60_000)
    assert len(simulation.trained) > 100
    assert simulation.ledger.table.timeline > 3
    assert simulation.expired > 0
