"""The store loses any suffix of its history: the ledger becomes again what the trainer's weights contain."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.errors import ApiError
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.pass_orders import PassRule
from controller.ledger.reconcile import (
    MOST_BEGINNINGS,
    Claim,
    FromSnapshot,
    Known,
    Lineage,
    NeedSnapshot,
    Refuse,
    ResendSteps,
    decide,
    overdue,
)
from controller.ledger.rejoin import adopt, recommit
from controller.ledger.values import LedgerParams
from controller.state.publications import Publications
from schema.wire.batch import StepTable
from schema.wire.messages import ErrorCode, HeldLease, LedgerSnapshot
from schema.wire.mixture import Source
from schema.wire.weights import Publication
from tests.controller.drivers import make_header
from tests.controller.ledger.lost_history import World
from tests.controller.ledger.test_simulation import pass_rules
from tests.support.effort import examples
from tests.support.ledger import schedulable

PARAMS = LedgerParams(groups_per_step=2, n_samples=2, staleness_bound=1, n_positions=10)


def claim(**changes: Any) -> Claim:
    fields: dict[str, Any] = {"policy_epoch": 7, "timeline": 1, "began": 4, "first": 4, "steps": 9}
    return Claim(**{**fields, **changes})


@pytest.mark.parametrize(
    ("known", "claimed", "expected"),
    [
        (Known(7, 1, 9), claim(), ResendSteps(9)),
        (Known(7, 1, 6), claim(), ResendSteps(6)),
        (Known(5, 0, 8), claim(), ResendSteps(4, back_to=4)),
        (Known(5, 0, 3), claim(), NeedSnapshot(0)),
        (Known(0, 0, 0), claim(), NeedSnapshot(0)),
        (Known(0, 0, 0), claim(timeline=0, began=0, first=0), ResendSteps(0)),
        (Known(0, 0, 5), claim(timeline=3, began=0, first=0), ResendSteps(0, back_to=0)),
        (Known(7, 1, 4), claim(first=6), NeedSnapshot(4)),
        (Known(7, 1, 4), claim(first=6, snapshot_step=8, snapshot_timeline=1), FromSnapshot(8)),
        (Known(5, 0, 8), claim(timeline=2, first=8, began=8, steps=8), NeedSnapshot(0)),
        (Known(5, 0, 8), claim(timeline=3, since=0), ResendSteps(4, back_to=4)),
        (Known(5, 0, 8), claim(timeline=3, since=1), NeedSnapshot(0)),
        (Known(5, 0, 8), claim(since=1), NeedSnapshot(0)),
        (Known(5, 1, 8), claim(timeline=3, since=1), ResendSteps(4, back_to=4)),
    ],
)
def test_what_follows_from_what_both_know(known: Known, claimed: Claim, expected: object) -> None:
    assert decide(known, claimed) == expected


@pytest.mark.parametrize(
    ("known", "claimed", "code", "says"),
    [
        (Known(8, 1, 5), claim(), ErrorCode.STALE_EPOCH, "another trainer"),
        (Known(7, 2, 5), claim(), ErrorCode.CONFLICT, "timeline 2"),
        (Known(7, 1, 10), claim(), ErrorCode.CONFLICT, "must start again"),
        (Known(7, 1, 4), claim(first=6, snapshot_step=5), ErrorCode.CONFLICT, "newest checkpoint covers 5"),
        (Known(7, 1, 4), claim(first=6, snapshot_step=10), ErrorCode.CONFLICT, "newest checkpoint covers 10"),
        (Known(7, 1, 4), claim(first=10), ErrorCode.BAD_REQUEST, "cannot replay"),
        (Known(7, 1, 4), claim(began=10), ErrorCode.BAD_REQUEST, "begun at 10"),
    ],
)
def test_who_is_refused(known: Known, claimed: Claim, code: ErrorCode, says: str) -> None:
    decision = decide(known, claimed)
    assert isinstance(decision, Refuse)
    assert decision.code is code
    assert says in decision.reason


def test_a_checkpoint_of_another_timeline_is_not_in_the_ledger_though_the_numbers_fit() -> None:
    lineage = Lineage()
    lineage.begin(1, 4)
    assert lineage.contains(8, 1, 9)
    assert lineage.contains(4, 0, 9)
    assert not lineage.contains(5, 0, 9), "its step 5 is of the timeline that was left at 4"
    assert not lineage.contains(8, 2, 9), "a timeline that the store has forgotten"
    assert not lineage.contains(10, 1, 9)
    assert lineage.contains(0, 5, 9), "the initial weights are the same in all"
    assert lineage.contains(7, None, 9)


@pytest.mark.scaled
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_lineage_says_which_checkpoints_the_steps_contain(data: st.DataObject) -> None:
    """Against the truth: each step is a number of its own, each timeline the list of its steps so far."""
    lineage, steps, numbers = Lineage(), list[int](), itertools.count()
    checkpoints = [(0, list[int]())]
    histories = {0: list[int]()}
    timeline = 0
    for _ in range(data.draw(st.integers(1, 12))):
        steps += [next(numbers) for _ in range(data.draw(st.integers(0, 3)))]
        checkpoints.append((timeline, steps[:]))
        histories[timeline] = steps[:]
        of, saved = data.draw(st.sampled_from(checkpoints))
        inside = lineage.floor <= len(saved) and steps[: len(saved)] == saved
        inside &= of >= lineage.first or of == lineage.source  # of others nothing is known after a snapshot
        assert lineage.contains(len(saved), of, len(steps)) == (inside or not saved)
        timeline, steps = timeline + 1, saved[:]
        if inside:
            lineage.begin(timeline, len(saved))
        else:
            lineage.begin_from(of, len(saved), timeline, len(saved))
        record = json.loads(json.dumps({"timeline": timeline, "lineage": lineage.to_record()}))
        lineage = Lineage.from_header(record)
        histories[timeline] = saved
        since = [histories[number][: len(saved)] for number in range(lineage.since, timeline)]
        assert since == [saved] * (timeline - lineage.since), "all timelines from `since` on have these steps"


def test_a_lineage_is_bounded_and_then_only_denies() -> None:
    lineage, committed = Lineage(), 10 * MOST_BEGINNINGS
    for timeline in range(1, committed):
        lineage.begin(timeline, timeline)
    assert len(lineage.begun) == MOST_BEGINNINGS
    contained = [lineage.contains(timeline + 1, timeline, committed) for timeline in range(1, committed)]
    assert contained == sorted(contained)
    assert contained.count(True) == MOST_BEGINNINGS
    assert not any(lineage.contains(timeline + 2, timeline, committed) for timeline in range(1, committed - 1))


def test_a_header_without_a_lineage_knows_the_timeline_before() -> None:
    lineage = Lineage.from_header({"timeline": 3, "began": 4})
    assert lineage.contains(4, 2, 9)
    assert lineage.contains(9, 3, 9)
    assert not lineage.contains(5, 2, 9)
    assert not lineage.contains(4, 1, 9)


@pytest.mark.scaled
@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=7), st.integers(0, 4), st.integers(1, 2))
def test_what_is_given_up_is_the_least_that_must_be(jobs: list[tuple[int, int]], first: int, slots: int) -> None:
    given_up = set(overdue(jobs, first, slots))

    def possible(kept: set[int]) -> bool:
        deadlines = [jobs[index][0] for index in kept]
        counts = {deadline: deadlines.count(deadline) for deadline in deadlines}
        return all(deadline >= first for deadline in deadlines) and schedulable(counts, first, slots)

    everything = set(range(len(jobs)))
    assert possible(everything - given_up)
    best = max(
        sum(jobs[index][1] for index in kept)
        for size in range(len(jobs) + 1)
        for kept in itertools.combinations(everything, size)
        if possible(set(kept))
    )
    assert sum(jobs[index][1] for index in everything - given_up) == best


# ---- the whole --------------------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> LedgerParams:
    fields: dict[str, Any] = {
        "groups_per_step": draw(st.integers(1, 4)), "n_samples": draw(st.integers(1, 3)),
        "greedy": draw(st.booleans()),
        "staleness_bound": draw(st.integers(0, 3)), "n_positions": draw(st.integers(2, 25)),
        "data_passes": draw(st.integers(1, 2)), "max_steps": draw(st.none() | st.integers(1, 8)),
        "max_attempts": 50, "on_reward_error": draw(st.sampled_from(["retry", "mask", "drop"])),
        "filter_metrics": draw(st.sampled_from([(), ("r",)])), "keep_payloads": True,
        "keep_recent": draw(st.sampled_from([2, 512])),
    }  # fmt: skip
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(1, 9), min_size=2, max_size=3))
        sources = tuple(Source(f"s{k}", n, draw(st.sampled_from([0.2, 1.0]))) for k, n in enumerate(rows))
        fields |= {"sources": sources, "n_positions": sum(rows)}
    if draw(st.booleans()):
        fields |= {"by_results": draw(pass_rules), "data_passes": 2}
    return LedgerParams(**fields)


@pytest.mark.scaled
@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs(), st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_any_loss_at_any_moment(
    params: LedgerParams, seed: int, n_rollouts: int, chaos: float, forgetful: bool
) -> None:
    World(seed, params, n_rollouts, forgetful=forgetful).run(chaos)


@pytest.mark.parametrize("seed", [148, 159, 320])
def test_a_long_job_that_loses_its_history_all_the_time(seed: int) -> None:
    params = LedgerParams(
        groups_per_step=3, n_samples=2, staleness_bound=seed % 3, n_positions=40, max_attempts=50,
        filter_metrics=("r",), keep_payloads=True, keep_recent=8,
        sources=(Source("a", 30, 0.6), Source("b", 10, 0.4)) if seed == 159 else (),
        by_results=PassRule("uncertain_first", 1, 1, 1.0, 7, True) if seed == 159 else None,
    )  # fmt: skip
    world = World(seed, params, 3)
    world.run(chaos=1.0)
    assert min(world.seen[what] for what in ("lost", "replayed", "crash", "zombie")) > 0


# ---- what may not be believed -----------------------------------------------------------------------------


def snapshot(**changes: Any) -> LedgerSnapshot:
    fields: dict[str, Any] = {
        "committed_steps": 2, "timeline": 0, "frontier": 6, "untrained": [4], "dropped": {"stale": 1},
        "n_positions": 10,
    }  # fmt: skip
    return LedgerSnapshot.model_validate({**fields, **changes})


def test_a_ledger_begins_from_a_snapshot_and_forgets_what_it_was() -> None:
    ledger = Ledger(GroupTable(PARAMS))
    ledger.lease("r", "request-1", 0, 0, 3, 0.0)
    ledger.table.take_changes()
    ledger.begin_from(snapshot())
    status = ledger.table.status()
    table = ledger.table
    assert (table.committed, table.timeline, table.began, table.durable) == (2, 1, 2, 2)
    assert sum(status.states.values()) == status.created == 6
    assert (status.states["durable"], status.states["waiting"], status.dropped) == (4, 1, {"stale": 1})
    assert set(ledger.table.take_changes().removed) == {"e0-p0", "e0-p1", "e0-p2"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_positions": 11}, "11 prepared rows"), ({"frontier": 11}, "11 positions were handed out"),
        ({"untrained": [4, 4]}, "must rise"), ({"untrained": [5, 4]}, "must rise"),
        ({"untrained": [6]}, "below its frontier"), ({"untrained": [0, 1, 2, 3, 4, 5]}, "more than the 6"),
        ({"dropped": {"stale": 6}}, "more than the 6"), ({"dropped": {"boredom": 1}}, "boredom"),
        ({"order": "shuffled by 8"}, "another order"),
    ],
)  # fmt: skip
def test_a_snapshot_that_cannot_be_is_refused_and_changes_nothing(changes: dict[str, Any], says: str) -> None:
    ledger = Ledger(GroupTable(replace(PARAMS, order="shuffled by 7")))
    ledger.lease("r", "request-1", 0, 0, 3, 0.0)
    before = ledger.table.status()
    with pytest.raises(ApiError, match=says):
        ledger.begin_from(snapshot(**changes))
    assert ledger.table.status() == before


def table(step: int, names: list[str], **changes: Any) -> StepTable:
    n = len(names)
    fields: dict[str, Any] = {
        "step": step, "timeline": 0, "policy_epoch": 1, "group_ids": names, "group": list(range(n)),
        "index": [0] * n, "score": [1.0] * n, "rewards": {"r": [1.0] * n}, "prompt_tokens": [1] * n,
        "response_tokens": [1] * n, "total_tokens": [2] * n, "oldest_version": [step] * n,
        "newest_version": [step] * n, "finish_reason": ["stop"] * n,
    }  # fmt: skip
    return StepTable.model_validate({**fields, **changes})


def test_a_replayed_step_takes_its_groups_wherever_they_are() -> None:
    ledger = Ledger(GroupTable(PARAMS))
    (held,) = ledger.lease("r", "request-1", 0, 0, 1, 0.0).groups
    assert recommit(ledger.table, table(0, ["e0-p0", "e0-p3"]))
    status = ledger.table.status()
    assert (status.states["trained"], status.states["waiting"], status.created) == (2, 2, 4)
    assert status.staleness == {0: 2}
    assert held.lease_id is None
    assert not recommit(ledger.table, table(0, ["e0-p0", "e0-p3"]))


@pytest.mark.parametrize(
    ("replayed", "says"),
    [
        (table(2, []), "step 1 is next"), (table(1, ["e0-p0"]), "trained in step 0"),
        (table(1, ["e0-p4", "e0-p4"]), "twice"), (table(1, ["e0-p4", "e0-p5", "e0-p6"]), "2 at most"),
        (table(1, ["e0-p10"]), "not a group of"), (table(1, ["e1-p0"]), "not a group of"),
        (table(1, ["e0-p04"]), "not a group of"), (table(1, ["../../etc"]), "not a group of"),
        (table(1, ["e0-p4"], oldest_version=[-1], newest_version=[1]), "row 0"),
        (table(1, ["e0-p4"], index=[2]), "sample 2"), (table(1, ["e0-p4"], finish_reason=["bored"]), "row 0"),
        (table(1, ["e0-p4"], score=[float("nan")]), "row 0"),
    ],
)  # fmt: skip
def test_a_replay_that_cannot_be_is_refused_and_changes_nothing(replayed: StepTable, says: str) -> None:
    ledger = Ledger(GroupTable(PARAMS))
    recommit(ledger.table, table(0, ["e0-p0"]))
    before = ledger.table.status()
    if replayed.oldest_version == [-1]:
        replayed = table(3, ["e0-p4"], oldest_version=[0], newest_version=[3])
        recommit(ledger.table, table(1, ["e0-p1"]))
        recommit(ledger.table, table(2, ["e0-p2"]))
        before = ledger.table.status()
    with pytest.raises(ApiError, match=says):
        recommit(ledger.table, replayed)
    assert ledger.table.status() == before


# ---- publications -----------------------------------------------------------------------------------------


def publication(number: int, version: int, digest: str, timeline: int = 0) -> Publication:
    return Publication(
        id=number, version=version, timeline=timeline, uri=digest.replace(" ", "-"), manifest_hash=digest,
        content_hash=digest, n_bytes=1,
    )  # fmt: skip


def test_forgotten_publications_keep_their_ids_and_an_id_never_means_anything_else() -> None:
    publications = Publications(keep=2)
    publications.heard(9)
    publications.declare([publication(7, 6, "six"), publication(8, 7, "seven")], timeline=0)
    assert publications.newest_id == 8
    assert publications.valid(7, "six") is not None
    assert publications.valid(7, "other") is None
    publications.declare([publication(8, 7, "another seven")], timeline=0)
    newest = publications.newest
    assert newest is not None
    assert (newest.id, newest.manifest_hash) == (10, "another seven")
    assert publications.valid(8, "seven") is not None
    restored = Publications(2, [entry.to_record() for entry in publications.take_changes()], 12)
    assert restored.highest_id == 12


def test_a_number_from_nowhere_is_not_believed() -> None:
    publications = Publications(keep=2)
    publications.heard(10**15)
    assert publications.highest_id == 0


def test_files_that_the_trainer_does_not_declare_are_gone() -> None:
    publications = Publications(keep=2)
    publications.declare([publication(1, 0, "a"), publication(2, 1, "b"), publication(3, 2, "c")], timeline=0)
    publications.declare([publication(1, 0, "a"), publication(3, 2, "c")], timeline=0)
    assert publications.valid(2) is not None
    publications.declare([publication(1, 0, "a")], timeline=0)
    assert publications.newest_id == 1


# ---- leases -----------------------------------------------------------------------------------------------


def held(group: str, version: int = 0, pushed: Sequence[int] = ()) -> HeldLease:
    return HeldLease(group_id=group, lease_id=f"lease-of-{group}", version=version, pushed=list(pushed))


def test_a_forgotten_lease_is_taken_back_and_its_samples_count() -> None:
    ledger = Ledger(GroupTable(PARAMS))
    assert adopt(ledger.table, "r", [held("e0-p1")], 0.0) == []
    status = ledger.table.status()
    assert (status.states["leased"], status.states["waiting"], status.created) == (1, 1, 2)
    outcome = ledger.push("e0-p1", "lease-of-e0-p1", 0, make_header(0, 0), 10)
    assert outcome.accepted
    assert ledger.renew("r", ["lease-of-e0-p1"], 1.0) == []


def test_a_lease_granted_since_gives_way_once_and_only_while_nothing_is_pushed_under_it() -> None:
    ledger = Ledger(GroupTable(PARAMS))
    ledger.table.succeeds = True
    (group,) = ledger.lease("other", "request-1", 0, 0, 1, 0.0).groups
    later = str(group.lease_id)
    assert adopt(ledger.table, "r", [held("e0-p0", pushed=[0])], 0.0) == ["lease-of-e0-p0"]
    assert ledger.renew("other", [later], 0.0) == [], "what was pushed before is lost, so this one stays"
    assert adopt(ledger.table, "r", [held("e0-p0")], 0.0) == []
    assert ledger.renew("other", [later], 0.0) == [later]
    back = HeldLease(group_id="e0-p0", lease_id=later, version=0)
    assert adopt(ledger.table, "other", [back], 0.0) == [later], "they do not take it from each other again and again"
    (group,) = ledger.lease("other", "request-2", 0, 0, 1, 0.0).groups
    assert ledger.push(group.id, str(group.lease_id), 0, make_header(0, 0), 10).accepted
    assert adopt(ledger.table, "r", [held(group.id)], 0.0) == [f"lease-of-{group.id}"]


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param(held("e0-p1", version=-1), id="no version"),
        pytest.param(held("e0-p1", pushed=[0]), id="its sample is lost"),
        pytest.param(held("e0-p0"), id="another holds it"),
        pytest.param(held("e0-p9"), id="far away"),
        pytest.param(held("e0-p99"), id="no position"),
        pytest.param(held("v1-p0"), id="no group"),
        pytest.param(held("e0-p3", version=1), id="stale"),
    ],
)
def test_a_lease_that_cannot_be_taken_back_is_lost(lease: HeldLease) -> None:
    ledger = Ledger(GroupTable(PARAMS))
    ledger.lease("other", "request-1", 0, 0, 1, 0.0)
    if lease.version == 1:
        for step in range(3):
            recommit(ledger.table, table(step, [f"e0-p{step + 4}"]))
    before = ledger.table.status()
    assert adopt(ledger.table, "r", [lease], 0.0) == [lease.lease_id]
    assert ledger.table.status() == before
