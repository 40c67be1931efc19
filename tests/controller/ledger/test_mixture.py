"""Shares of sources hold among what is trained, and the rows of each source come in their own order."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.ledger.group import DropReason, GroupState, parse_group_id
from controller.ledger.group_table import GroupTable
from controller.ledger.values import LedgerParams
from schema.wire.mixture import Exhausted, Mixture, OtherSourcesError, Source
from tests.controller.ledger.simulation import Simulation

SOURCES = (Source("math", 90, 0.5), Source("code", 400, 0.3), Source("chat", 30, 0.2))


class Killed(Simulation):
    """Counts what is killed."""

    flat = 1
    kills = 0

    def crash(self) -> None:
        self.kills += 1
        super().crash()

    def restart(self) -> None:
        self.kills += 1
        super().restart()

    def start_trainer(self, *args: object) -> None:
        self.kills += 1
        super().start_trainer(*args)  # type: ignore[arg-type]


def killed_job() -> Killed:
    """A job of three sources, of one of which most groups are dropped, killed again and again."""
    params = LedgerParams(
        groups_per_step=4, n_samples=2, staleness_bound=1, n_positions=520, keep_payloads=True,
        sources=SOURCES, filter_metrics=("r",), keep_recent=16,
    )  # fmt: skip
    job = Killed(7, params, 3)
    job.run(chaos=1.0, max_events=60_000)
    return job


def check_shares(job: Killed) -> None:
    """Assert that of n trained groups each source has n * share, up to those that may be in flight."""
    sources = job.ledger.table.status().sources
    trained, in_flight = sum(source.trained for source in sources), 2 * 4 + len(sources)
    assert {source.name: source.trained for source in sources} == {
        source.name: pytest.approx(trained * source.share, abs=in_flight) for source in sources
    }


def test_shares_hold_among_trained_groups_whatever_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    job = killed_job()
    assert job.kills > 100
    check_shares(job)
    table = job.ledger.table
    assert table.mixture.dropped[1] > 3 * (table.mixture.dropped[0] + table.mixture.dropped[2]), "one is filtered"
    assert table.mixture.drawn[2] > 30, "the smallest has gone through its rows"
    places = {table.mixture.at(*(parse_group_id(name) or (0, 0, 0))) for name in job.trained}
    assert len(places) == len(job.trained)
    assert places <= set(table.mixture.handed_out_places())
    monkeypatch.setattr(Mixture, "kept", property(lambda self: list(self.drawn)))
    with pytest.raises(AssertionError):
        check_shares(killed_job())


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 10)), min_size=1, max_size=6), st.integers(1, 3))
def test_without_drops_each_source_is_near_its_share_at_every_moment(
    pairs: list[tuple[int, float]], passes: int
) -> None:
    mixture = Mixture([Source(str(k), rows, share) for k, (rows, share) in enumerate(pairs)], passes)
    while (source := mixture.next()) is not None:
        at = mixture.draw(source)
        assert mixture.at(*mixture.place(at)) == at
        assert (mixture.undrawn(at), mixture.undrawn(at + len(mixture))) == (0, 1)
        for drawn, share in zip(mixture.drawn, mixture.shares, strict=True):
            assert abs(drawn - share * mixture.handed_out) < len(mixture)
    assert mixture.handed_out == passes * sum(rows for rows, _ in pairs)


def test_a_job_stops_where_the_smallest_source_ends() -> None:
    mixture = Mixture([Source("small", 10, 0.5), Source("large", 1000, 0.5)], 2, "stop")
    while (source := mixture.next()) is not None:
        mixture.draw(source)
    assert mixture.drawn == [20, 20]
    assert mixture.total == 40


def test_a_job_that_stops_goes_through_its_rows_though_groups_are_dropped() -> None:
    mixture = Mixture([Source("easy", 100, 0.5), Source("hard", 1000, 0.5)], 1, "stop")
    while (source := mixture.next()) is not None:
        mixture.draw(source)
        mixture.dropped[source] += source == 1 and mixture.drawn[1] % 4 != 0
    assert mixture.drawn[0] == 100
    assert mixture.kept == [pytest.approx(100, abs=2)] * 2
    assert mixture.total >= sum(mixture.kept)


@pytest.mark.parametrize("exhausted", ["repeat", "stop"])
def test_changed_shares_count_from_their_beginning(exhausted: Exhausted) -> None:
    mixture = Mixture([Source("a", 1000, 0.5), Source("b", 1000, 0.5)], 1, exhausted)
    for _ in range(400):
        mixture.draw(mixture.next() or 0)
    changed = Mixture([Source("a", 1000, 0.9), Source("b", 1000, 0.1)], 1, exhausted)
    changed.load(mixture.to_record())
    for _ in range(100):
        changed.draw(changed.next() or 0)
    assert changed.drawn == [290, 210]
    assert changed.total > 500
    restored = Mixture(changed.sources, 1, exhausted)
    restored.load(changed.to_record())
    assert (restored.next(), restored.total) == (changed.next(), changed.total)


@pytest.mark.parametrize("exhausted", ["repeat", "stop"])
def test_a_stage_counts_from_its_beginning(exhausted: Exhausted) -> None:
    sources = [Source("easy", 500, 0.8, (0.2, 0.0)), Source("hard", 500, 0.2, (0.8, 1.0))]
    mixture = Mixture(sources, 1, exhausted, stages=[100, 200])
    assert mixture.total == (1000 if exhausted == "repeat" else 600)

    def go_on(groups: int) -> list[int]:
        before = list(mixture.drawn)
        for _ in range(groups):
            mixture.draw(mixture.next() or 0)
        return [drawn - was for drawn, was in zip(mixture.drawn, before, strict=True)]

    assert go_on(100) == [80, 20]
    assert go_on(50) == [10, 40]
    mixture.dropped, total = [5, 60], mixture.total
    assert go_on(65) == [5, 60], "each drop is replaced by its own source, in the same stage"
    restored = Mixture(sources, 1, exhausted, stages=[100, 200])
    restored.load(mixture.to_record())
    assert (restored.to_record(), restored.next()) == (mixture.to_record(), mixture.next())
    assert (go_on(50), mixture.total, restored.total) == ([10, 40], total, total)
    assert go_on(1) == [0, 1]
    mixture.dropped[0] += 1
    assert go_on(50) == [0, 50], "a source without a share gets none"


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 10)), min_size=2, max_size=6),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_what_is_trained_on_policy_depends_on_nothing_that_happens_meanwhile(
    pairs: list[tuple[float, float]], per_step: int, start: int, seed: int
) -> None:
    """Whichever rows are dropped, and whenever that is known: drawing ahead of it, or one after the other."""
    pairs[0] = (pairs[0][0], pairs[0][1] or 1.0)
    sources = [Source(str(k), 10_000, share, (later,)) for k, (share, later) in enumerate(pairs)]
    dropped = random.Random(seed)
    is_dropped = {(k, i): dropped.random() < 0.4 for k in range(len(pairs)) for i in range(200)}

    def trained(random_: random.Random) -> list[set[tuple[int, int]]]:
        mixture, steps = Mixture(sources, 1, stages=[start * per_step]), []
        for step in range(6):
            in_flight: list[tuple[int, int]] = []
            kept: set[tuple[int, int]] = set()
            while in_flight or sum(mixture.kept) < (step + 1) * per_step:
                mixture.next()  # a question whether further groups follow changes nothing
                if sum(mixture.kept) < (step + 1) * per_step and (not in_flight or random_.random() < 0.6):
                    source = mixture.next()
                    assert source is not None
                    in_flight.append((source, mixture.drawn[source]))
                    mixture.draw(source)
                else:
                    group = in_flight.pop(random_.randrange(len(in_flight)))
                    mixture.dropped[group[0]] += is_dropped[group]
                    kept |= set() if is_dropped[group] else {group}
                if random_.random() < 0.1:
                    again = Mixture(sources, 1, stages=[start * per_step])
                    again.load(json.loads(json.dumps(mixture.to_record())))
                    mixture = again
            steps.append(kept)
        return steps

    assert trained(random.Random(seed + 1)) == trained(random.Random(seed + 2))


def test_a_job_that_goes_on_with_other_keys_has_the_end_that_follows_from_them() -> None:
    sources = (Source("a", 30, 0.9, (0.1,)), Source("b", 100, 0.1, (0.9,)))
    params = LedgerParams(1, 1, staleness_bound=0, n_positions=130, sources=sources, exhausted="stop")
    table = GroupTable(params)
    for _ in range(10):
        table.create()
    others = [replace(params, data_passes=3), replace(params, exhausted="repeat"), replace(params, stages=(20,))]
    totals = [GroupTable(other).total_steps for other in (params, *others)]
    assert len(set(totals)) == 4
    header = json.loads(json.dumps(table.header()))
    restored = [GroupTable.restore(other, header, {}, {}, {}).total_steps for other in (params, *others)]
    assert restored == totals
    table.drop(table.create(), DropReason.OVERLONG)
    header = table.header()
    again = GroupTable.restore(params, header, {}, {}, {}).total_steps
    assert again == totals[0], "what is dropped changes nothing of an end that is known"


def test_a_source_that_gives_nothing_is_named() -> None:
    params = LedgerParams(
        groups_per_step=2, n_samples=2, staleness_bound=0, n_positions=100,
        sources=(Source("fine", 90, 0.5), Source("flat", 10, 0.5)), filter_metrics=("r",),
    )  # fmt: skip
    job = Simulation(1, params, 1)
    job.probes, job.flat, events = 0.0, 1, 0
    job._reward = lambda group: 1.0 if group is not None and group.source else float(job.random.random())  # type: ignore[method-assign]
    while job.ledger.barren is None and (events := events + 1) < 5000:
        job.random.choice([job.lease, job.push, job.push, job.update, job.step])()
    assert job.ledger.barren == params.sources[1]
    assert (job.ledger.table.mixture.dropped[1], job.ledger.table.mixture.drawn[0] <= 24) == (20, True)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5), st.integers(0, 5)), min_size=2, max_size=4),
    st.integers(1, 40),
)
def test_the_end_of_a_job_that_stops_is_known_from_the_beginning(
    parts: list[tuple[int, int, int]], start: int
) -> None:
    later = [share for _, _, share in parts]
    later[0] = later[0] or 1
    sources = [Source(str(k), rows, share, (later[k],)) for k, (rows, share, _) in enumerate(parts)]
    for stages in ([start], [start, start + 7], []):
        of_stages = [replace(source, stages=source.stages * len(stages)) for source in sources]
        mixture = Mixture(of_stages, 1, "stop", stages=stages)
        assert mixture.total == len(mixture.order())


def test_other_early_rows_are_named() -> None:
    params = LedgerParams(groups_per_step=1, n_samples=1, staleness_bound=0, n_positions=3, order="shuffled by 1")
    header = GroupTable(replace(params, order="shuffled by 1, first 0123")).header() | {"frontier": 1}
    with pytest.raises(OtherSourcesError, match="the first pass began with other rows, prepared before all others"):
        GroupTable.restore(params, header, {}, {}, {})


def test_a_run_goes_on_with_its_own_order_alone() -> None:
    params = LedgerParams(groups_per_step=1, n_samples=1, staleness_bound=0, n_positions=3, order="shuffled by 1")
    header = GroupTable(params).header()
    assert GroupTable.restore(replace(params, order="shuffled by 2"), header, {}, {}, {}).frontier == 0, (
        "none is drawn"
    )
    header["frontier"] = 1
    with pytest.raises(OtherSourcesError, match=r"its rows in another order: train\.seed"):
        GroupTable.restore(replace(params, order="shuffled by 2"), header, {}, {}, {})
    del header["order"]
    assert GroupTable.restore(params, header, {}, {}, {}).frontier == 1


def test_other_sources_are_refused() -> None:
    record = Mixture([Source("a", 10), Source("b", 20)], 1).to_record()
    with pytest.raises(ValueError, match="in another order: write the parts or domains as a, b"):
        Mixture([Source("b", 20), Source("a", 10)], 1).load(record)
    with pytest.raises(ValueError, match="it was made with other sources"):
        Mixture([Source("a", 10), Source("b", 21)], 1).load(record)
    with pytest.raises(ValueError, match="it was made with other sources"):
        Mixture([Source("a", 12, early=10), Source("b", 21, early=21)], 1).load(record)
    Mixture([Source("a", 12, early=10), Source("b", 21, early=20)], 1).load(record)


def test_groups_of_a_source_have_ids_and_passes_of_their_own() -> None:
    params = LedgerParams(
        groups_per_step=1, n_samples=1, staleness_bound=0, n_positions=3,
        sources=(Source("a", 1, 0.5), Source("b", 2, 0.5)), data_passes=2,
    )  # fmt: skip
    job = Simulation(1, params, 1)
    job.run(chaos=0.0)
    assert set(job.trained) == {"e0-p0", "e0-p0-s1", "e1-p0", "e0-p1-s1", "e2-p0", "e1-p0-s1"}
    assert not list(job.ledger.table.in_state(GroupState.WAITING))
