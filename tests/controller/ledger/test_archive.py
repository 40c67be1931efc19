"""A ledger that forgets the details of what is done answers as one that keeps everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.ledger.archive import DROPS_PER_ROW, Archive
from controller.ledger.assembly import Assembled
from controller.ledger.group import GroupState
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.rejoin import adopt
from controller.ledger.values import LeaseDecision, LedgerParams
from schema.wire.messages import ErrorCode, HeldLease
from tests.controller.ledger.simulation import Simulation
from tests.controller.ledger.test_ledger import fill_each, lease, make, train
from tests.support.effort import examples
from tests.support.ledger import StoredLedger

COMPARED = (
    "lease", "renew", "release", "replica_gone", "expire", "extend_leases", "push", "assemble", "commit",
    "abandon_step", "checkpoint", "snapshot", "rewind", "begin_from",
)  # fmt: skip


def _ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"lease-{next(numbers)}"


def _plain(answer: Any) -> Any:
    """An answer without the objects of one ledger."""
    if isinstance(answer, LeaseDecision):
        groups = [(group.id, group.lease_id, group.deadline, sorted(group.samples)) for group in answer.groups]
        return groups, answer.refusal
    if isinstance(answer, Assembled):
        return answer.step, [group.id for group in answer.groups]
    if hasattr(answer, "stragglers"):
        return answer.reason, [group.id for group in answer.stragglers]
    # A late repetition is no longer told apart.
    if hasattr(answer, "duplicate") and hasattr(answer, "accepted"):
        return answer.accepted or answer.code is ErrorCode.LEASE_LOST
    return answer


class Twins:
    """Two ledgers that are asked the same: one keeps everything, one forgets as soon as it may."""

    def __init__(self, params: LedgerParams) -> None:
        self.params = params
        self.whole = Ledger(GroupTable(replace(params, keep_recent=10**6)), _ids())
        self.short = Ledger(GroupTable(replace(params, keep_recent=0)), _ids())
        self.stored = StoredLedger()

    def __getattr__(self, name: str) -> Any:
        return self.both(name) if name in COMPARED else getattr(self.whole, name)

    @property
    def table(self) -> Any:
        return _Tables(self)

    def both(self, name: str) -> Any:
        """A method of both ledgers, or of both tables, whose answers are compared."""
        of = attrgetter(name)

        def both(*arguments: Any, **named: Any) -> Any:
            theirs = _plain(of(self.short)(*arguments, **named))
            answer = of(self.whole)(*arguments, **named)
            assert _plain(answer) == theirs, f"{name}{arguments}"
            if name in ("commit", "rewind", "checkpoint"):
                self.compare()
            return answer

        return both

    def compare(self) -> None:
        mine, theirs = self.whole.table.status(), self.short.table.status()
        assert mine.model_copy(update={"duplicates": 0}) == theirs.model_copy(update={"duplicates": 0})
        for name, group in self.whole.table.groups.items():
            found = self.short.table.find(name)
            assert found is not None
            assert (found.state, found.step, found.reason) == (group.state, group.step, group.reason)

    def restart_short(self) -> None:
        """The one that forgets dies and comes back from what it had written."""
        self.stored.write(self.short)
        before, self.short = (self.short, self.stored.restore(self.short.params, self.short._new_lease_id))
        # not stored, and only the twin goes on with it
        self.short._lag = before._lag
        self.short.table.waiting_since = before.table.waiting_since
        for name, group in self.short.table.groups.items():
            group.missed = before.table.groups[name].missed


class _Tables:
    """The tables of twins: the one that keeps everything is read, both are changed."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins

    def __getattr__(self, name: str) -> Any:
        return self._twins.both(f"table.{name}") if name in COMPARED else getattr(self._twins.whole.table, name)


class TwinSimulation(Simulation):
    """The usual schedules against twins. Restarts are those of the forgetful one."""

    def __init__(self, seed: int, params: LedgerParams, n_replicas: int) -> None:
        super().__init__(seed, params, n_replicas)
        self.twins = Twins(params)
        self.ledger = self.twins  # type: ignore[assignment]

    probes = 0.0  # they go by how often groups were tried, which is forgotten with them

    def restart(self) -> None:
        self.twins.restart_short()

    def adopt(self, replica_id: str, held: list[HeldLease]) -> list[str]:
        lost = adopt(self.twins.short.table, replica_id, held, self.now)
        assert adopt(self.twins.whole.table, replica_id, held, self.now) == lost
        return lost

    def resume_from_snapshot(self) -> None:
        return None

    def report(self) -> None:
        return None

    def crash(self) -> None:
        return None  # how often holders crashed with a group is forgotten with it


@pytest.mark.scaled
@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 3), st.booleans(), st.sampled_from([(), ("r",)]))
def test_forgetting_changes_no_answer(
    seed: int, bound: int, groups_per_step: int, keep: bool, metrics: tuple[str, ...]
) -> None:
    params = LedgerParams(
        groups_per_step=groups_per_step, n_samples=2, staleness_bound=bound, n_positions=20, data_passes=2,
        max_attempts=1000, on_reward_error="drop", filter_metrics=metrics, keep_payloads=keep,
    )  # fmt: skip
    simulation = TwinSimulation(seed, params, n_replicas=2)
    simulation.run(chaos=1.0)
    short = simulation.twins.short
    assert short.table.archive.trained + short.table.archive.dropped.total() > 0
    whole = simulation.twins.whole.table.groups.values()
    in_order = sorted(whole, key=lambda group: (group.epoch, group.position))
    assert [group.id for group in short.table.in_order(0, 1000)] == [group.id for group in in_order]


def test_a_forgotten_group_costs_a_row_of_its_step_alone() -> None:
    ledger = make(n_positions=400, keep_recent=0)
    stored = StoredLedger()
    for step in range(100):
        fill_each(ledger, lease(ledger, 2, version=step, request=f"r{step}"), version=step)
        train(ledger)
        stored.write(ledger)
    assert (len(ledger.table.groups), len(stored.groups), len(stored.samples)) == (0, 0, 0)
    assert stored.payloads == set()
    assert len(stored.archive) == 100
    again = stored.restore(ledger.params)
    assert again.table.status() == ledger.table.status()
    again.rewind(40)
    assert again.table.status().states["waiting"] == 120
    assert sum(again.table.status().staleness.values()) == 40 * 2 * ledger.params.n_samples
    stored.write(again)
    assert len(stored.archive) == 40
    assert stored.restore(ledger.params).table.status() == again.table.status()


def test_the_newest_groups_are_kept_whole() -> None:
    ledger = make(n_positions=100, keep_recent=4)
    for step in range(5):
        fill_each(ledger, lease(ledger, 2, version=step, request=f"r{step}"), version=step)
        train(ledger)
    assert sorted(ledger.table.groups) == ["e0-p6", "e0-p7", "e0-p8", "e0-p9"]
    old = ledger.table.find("e0-p0")
    assert old is not None
    assert (old.state, old.step, old.samples) == (GroupState.TRAINED, 0, {})
    assert ledger.table.find("e0-p00") is None
    assert ledger.table.find("e0-p10") is None
    assert [group.id for group in ledger.table.in_order(5, 2)] == ["e0-p5", "e0-p6"]


def test_a_group_whose_payload_may_be_needed_is_not_forgotten() -> None:
    ledger = make(n_positions=100, keep_recent=0, keep_payloads=True)
    groups = lease(ledger, 4)
    fill_each(ledger, groups)
    train(ledger)
    assert ledger.table.groups.keys() >= {group.id for group in groups}
    ledger.rewind(0)
    assert {group.state for group in groups} == {GroupState.READY}


def test_drops_are_stored_in_rows_of_many() -> None:
    history = Archive()
    for position in range(DROPS_PER_ROW + 1):
        history.add_dropped(position, "stale" if position % 2 else "poison")
    rows = {name: history.row(name) for name in history.take_changes()}
    assert sorted(rows) == ["d0", "d1"]
    history.add_dropped(DROPS_PER_ROW + 1, "stale")
    assert list(history.take_changes()) == ["d1"]
    again = Archive.restore({**rows, "d1": history.row("d1")})
    assert again.dropped == history.dropped == Counter(poison=129, stale=129)
    assert again.reason_of(1) == "stale"
    assert again.step_of(1) is None
    assert DROPS_PER_ROW + 2 not in again
    again.clear()
    assert {name: again.row(name) for name in again.take_changes()} == {"d0": None, "d1": None}


def test_late_samples_of_a_forgotten_group_are_refused() -> None:
    ledger = make(keep_recent=0)
    groups = lease(ledger, 2)
    ids = [group.lease_id for group in groups]
    fill_each(ledger, groups)
    headers = [meta.header for meta in groups[0].samples.values()]
    train(ledger)
    outcome = ledger.push("e0-p0", ids[0] or "", 0, headers[0], 10)
    assert (outcome.accepted, outcome.code) == (False, ErrorCode.LEASE_LOST)
    assert "trained" in outcome.detail
    assert ledger.push("e9-p0", "x", 0, headers[0], 10).code is ErrorCode.NOT_FOUND
