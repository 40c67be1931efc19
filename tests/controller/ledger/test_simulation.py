"""Random schedules against the ledger: whatever crashes, nothing is lost, trained twice, or too old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.ledger.pass_orders import PassRule
from controller.ledger.values import LedgerParams
from schema.wire.mixture import Source
from tests.controller.ledger.simulation import Simulation
from tests.support.effort import examples

pass_rules = st.builds(
    PassRule,
    st.sampled_from(["none", "easiest_first", "hardest_first", "uncertain_first"]),
    solved=st.integers(0, 2), failed=st.integers(0, 2), pass_score=st.just(1.0),
    seed=st.integers(0, 3), shuffle=st.booleans(),
)  # fmt: skip


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
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
        shares = draw(st.lists(st.sampled_from([0.1, 1.0, 2.5]), min_size=len(rows), max_size=len(rows)))
        sources = tuple(Source(f"s{k}", *pair) for k, pair in enumerate(zip(rows, shares, strict=True)))
        fields |= {
            "sources": sources,
            "n_positions": sum(rows),
            "exhausted": draw(st.sampled_from(["repeat", "stop"])),
        }
        if draw(st.booleans()):
            later = draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=len(rows), max_size=len(rows)))
            later[0] = later[0] or 1.0
            fields["sources"] = tuple(replace(source, stages=(later[k],)) for k, source in enumerate(sources))
            fields["stages"] = (draw(st.integers(1, 20)),)
    if draw(st.booleans()):
        fields |= {"by_results": draw(pass_rules), "data_passes": draw(st.integers(1, 3))}
    return LedgerParams(**fields)


@st.composite
def early_jobs(draw: st.DrawFn) -> tuple[LedgerParams, LedgerParams]:
    """A job that begins with a part of its rows: its parameters then, and when all rows are prepared."""
    params = replace(draw(jobs()), exhausted="repeat", max_steps=draw(st.integers(1, 6)))
    sources = tuple(replace(source, early=draw(st.integers(1, source.rows))) for source in params.sources)
    early = sum(source.early for source in sources) or draw(st.integers(1, params.n_positions))
    begun = tuple(replace(source, rows=source.early) for source in sources)
    grown = (early,) if early < params.n_positions else ()
    return (
        replace(params, n_positions=early, sources=begun, unfinished=True),
        replace(params, sources=sources, grown=grown),
    )


@pytest.mark.scaled
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(early_jobs(), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 1.0, 3.0]))
def test_a_job_that_begins_with_a_part_of_its_rows_goes_on_with_all(
    jobs: tuple[LedgerParams, LedgerParams], seed: int, n_replicas: int, chaos: float
) -> None:
    params, whole = jobs
    simulation = Simulation(seed, params, n_replicas, whole)
    simulation.run(chaos)
    table = simulation.ledger.table
    assert table.committed >= (whole.max_steps or 0) or table.exhausted, "it ended before its steps, and had rows"
    for name, (data_pass, position, source) in simulation.rows.items():
        assert not data_pass or simulation.whole is None, f"{name} is of a second pass over a part of the rows"
        assert simulation.whole is None or position < params.mixture().sources[source].rows


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
    simulation = Simulation(seed=1, params=params, n_replicas=3)
    simulation.run(chaos=1.0, max_events=60_000)
    assert len(simulation.trained) > 100
    assert simulation.ledger.table.timeline > 3
    assert simulation.expired > 0
