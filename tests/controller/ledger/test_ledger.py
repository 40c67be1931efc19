"""The ledger by hand: each arrow of the picture in its docstring, and each refusal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from controller.errors import ApiError
from controller.ledger.assembly import Assembled, WaitingStep, build_table
from controller.ledger.checkpoint import go_on_changed
from controller.ledger.group import DropReason, Group, GroupState
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.values import LedgerParams
from schema.wire.messages import ErrorCode
from schema.wire.mixture import OtherSourcesError
from schema.wire.sample import MOST_REWARDS
from tests.controller.drivers import make_header
from tests.support.ledger import StoredLedger

PARAMS = LedgerParams(groups_per_step=2, n_samples=2, staleness_bound=1, n_positions=10)


def make(**changes: Any) -> Ledger:
    return Ledger(GroupTable(replace(PARAMS, **changes)))


def lease(ledger: Ledger, n: int, version: int = 0, replica: str = "r", request: str = "") -> list[Group]:
    request = request or f"request-{ledger.table.frontier}-{ledger.table.committed}-{version}"
    return ledger.lease(replica, request, version, max(version, 0), n, now=0.0).groups


def fill(ledger: Ledger, group: Group, version: int = 0, **changes: Any) -> None:
    lease_id = group.lease_id
    assert lease_id is not None
    for index in range(ledger.params.group_size):
        if index not in group.samples:
            header = make_header(index, version, **{"baseline": index == ledger.params.baseline, **changes})
            outcome = ledger.push(group.id, lease_id, index, header, 100)
            assert outcome.accepted, outcome


def fill_each(ledger: Ledger, groups: Iterable[Group], version: int = 0, **changes: Any) -> None:
    for group in groups:
        fill(ledger, group, version, **changes)


def batch(ledger: Ledger, now: float = 0.0) -> Assembled:
    """The batch of the next step, which can be assembled."""
    assembled = ledger.assemble(now)
    assert isinstance(assembled, Assembled), assembled
    return assembled


def test_a_forecast_is_the_next_batch_and_changes_nothing() -> None:
    ledger = make(staleness_bound=2)
    groups = lease(ledger, 5)
    fill_each(ledger, [groups[0], groups[1], groups[3]])
    first = batch(ledger)
    assert isinstance(ledger.prefetch(), WaitingStep), "one group is ready, and others are being made"
    fill(ledger, groups[4])
    guess = ledger.prefetch()
    assert isinstance(guess, Assembled)
    assert (guess.step, guess.groups) == (1, [groups[3], groups[4]])
    assert {group.state for group in guess.groups} == {GroupState.READY}
    assert batch(ledger) == first
    fill(ledger, groups[2])  # a group with a nearer deadline comes late: the guess was wrong
    ledger.commit(0)
    assert batch(ledger).groups == [groups[2], groups[3]]


def train(ledger: Ledger) -> list[Group]:
    assembled = batch(ledger)
    ledger.commit(assembled.step)
    return assembled.groups


def test_the_whole_way_of_a_group() -> None:
    ledger = make(keep_payloads=True)
    first, second = lease(ledger, 2)
    assert (first.state, first.attempt, first.deadline) == (GroupState.LEASED, 1, 1)
    assert first.id == "e0-p0"
    fill_each(ledger, [first, second])
    assert ledger.table.ready == 2
    assembled = batch(ledger)
    assert ledger.assemble(now=1.0) == assembled, "assembling again answers the same"
    assert ledger.commit(0)
    assert not ledger.commit(0)
    assert first.state is GroupState.TRAINED
    assert ledger.checkpoint(1) == 1
    assert first.state is GroupState.DURABLE
    assert ledger.table.status().staleness == {0: 4}


def test_the_level_counts_what_is_leased_and_what_the_bound_leaves() -> None:
    ledger = make()
    assert [ledger.level(among) for among in (1, 2, 3, 100)] == [4, 2, 2, 1]
    lease(ledger, 3)
    assert (ledger.room, ledger.level(2)) == (1, 2)
    lease(ledger, 1)
    assert (ledger.room, ledger.level(2)) == (0, 2)


def test_a_repeated_lease_request_gets_the_same_leases() -> None:
    ledger = make()
    once = ledger.lease("r", "request-1", 0, 0, 2, now=0.0).groups
    assert ledger.lease("r", "request-1", 0, 0, 2, now=5.0).groups == once
    assert ledger.table.frontier == 2


def test_pushes_are_counted_once_and_only_under_the_lease() -> None:
    ledger = make()
    (group,) = lease(ledger, 1)
    lease_id = group.lease_id or ""
    assert ledger.push(group.id, lease_id, 0, make_header(0, 0), 10).accepted
    assert ledger.push(group.id, lease_id, 0, make_header(0, 0), 10).duplicate
    assert ledger.push(group.id, "wrong", 1, make_header(1, 0), 10).code is ErrorCode.LEASE_LOST
    assert ledger.push("e0-p9", lease_id, 1, make_header(1, 0), 10).code is ErrorCode.NOT_FOUND
    assert ledger.push(group.id, lease_id, 1, make_header(0, 0), 10).code is ErrorCode.BAD_REQUEST
    assert ledger.push(group.id, lease_id, 2, make_header(2, 0), 10).code is ErrorCode.BAD_REQUEST
    assert group.state is GroupState.LEASED
    assert ledger.push(group.id, lease_id, 1, make_header(1, 0), 10).accepted
    assert group.state is GroupState.READY
    again = ledger.push(group.id, lease_id, 1, make_header(1, 0), 10)
    assert again.accepted
    assert again.duplicate
    assert ledger.table.status().duplicates == 2


def test_tokens_older_than_the_lease_are_refused() -> None:
    ledger = make()
    fill_each(ledger, lease(ledger, 2))
    train(ledger)
    (group,) = lease(ledger, 1, version=1)
    outcome = ledger.push(group.id, group.lease_id or "", 0, make_header(0, 0), 10)
    assert outcome.code is ErrorCode.CONFLICT


def test_tokens_over_a_cache_of_several_versions_count_as_the_oldest() -> None:
    """`update_mode = "keep_kv"`: such a group may be trained as long as its oldest cache entry allows."""
    ledger = make(staleness_bound=2)
    first, second = lease(ledger, 2)
    fill(ledger, first, newest_version=2)
    fill(ledger, second, 1, newest_version=2)
    assert (first.deadline, second.deadline) == (2, 3), (
        "the oldest version and the bound; never less than at the lease"
    )
    assert isinstance(ledger.assemble(now=0.0), Assembled)


def test_a_dead_replica_loses_its_leases_and_keeps_its_samples() -> None:
    ledger = make()
    (group,) = lease(ledger, 1, replica="dead")
    old_lease = group.lease_id or ""
    ledger.push(group.id, old_lease, 0, make_header(0, 0), 10)
    assert ledger.replica_gone("dead") == 1
    assert group.state is GroupState.WAITING
    assert ledger.table.outstanding == 0, "its throttle budget is free again"
    (again,) = lease(ledger, 1, replica="alive", request="request-alive")
    assert again is group
    assert (group.attempt, list(group.samples)) == (2, [0])
    assert ledger.push(group.id, old_lease, 1, make_header(1, 0), 10).code is ErrorCode.LEASE_LOST
    fill(ledger, group)
    assert group.state is GroupState.READY


def test_kept_samples_that_became_too_old_are_generated_again() -> None:
    ledger = make()
    stale, one, two = lease(ledger, 3)
    ledger.push(stale.id, stale.lease_id or "", 0, make_header(0, 0), 10)
    ledger.release(stale.lease_id or "")
    fill_each(ledger, [one, two])
    train(ledger)
    fill_each(ledger, lease(ledger, 2, version=1)[1:], version=1)
    assert stale.samples, "at step 1, tokens of version 0 can still be trained"
    ledger.release(stale.lease_id or "")
    (filler,) = lease(ledger, 2, version=1, request="fill-step-1")[:1]
    assert filler is stale
    ledger.release(stale.lease_id or "")
    fill_each(ledger, lease(ledger, 4, version=1, request="more-for-step-1"), version=1)
    train(ledger)
    assert ledger.table.committed == 2
    assert ledger.table.status().max_staleness <= 1


def test_expiry_renewal_and_forgotten_leases() -> None:
    ledger = make(lease_timeout=10.0)
    first, second = lease(ledger, 2)
    assert ledger.renew("r", [first.lease_id or "", "unknown"], now=8.0) == ["unknown"]
    assert second.state is GroupState.LEASED, "one missed beat may have crossed the grant"
    ledger.renew("r", [first.lease_id or ""], now=9.0)
    assert second.state is GroupState.WAITING
    assert ledger.expire(now=12.0) == 0
    assert ledger.expire(now=30.0) == 1
    assert first.state is GroupState.WAITING


def test_a_poisonous_prompt_is_quarantined_and_preemption_is_not_its_fault() -> None:
    ledger = make(max_attempts=2)
    for attempt in range(5):
        (group,) = lease(ledger, 1, request=f"preempted-{attempt}")
        ledger.release(group.lease_id or "")
    for attempt in range(2):
        (group,) = lease(ledger, 1, request=f"request-{attempt}")
        ledger.replica_gone("r")
    assert (group.state, group.reason) == (GroupState.DROPPED, DropReason.POISON)
    assert "crashed" in group.error
    assert ledger.table.status().dropped == {"poison": 1}


@pytest.mark.parametrize(
    ("policy", "state", "reason"),
    [
        ("retry", GroupState.WAITING, None),
        ("drop", GroupState.DROPPED, DropReason.REWARD_ERROR),
        ("mask", GroupState.READY, None),
    ],
)
def test_a_failed_reward_is_never_a_score(policy: Any, state: GroupState, reason: DropReason | None) -> None:
    ledger = make(on_reward_error=policy)
    (group,) = lease(ledger, 1)
    lease_id = group.lease_id or ""
    ledger.push(group.id, lease_id, 0, make_header(0, 0, score=None, error="ValueError: no"), 10)
    ledger.push(group.id, lease_id, 1, make_header(1, 0), 10)
    assert (group.state, group.reason, group.error) == (state, reason, "ValueError: no")
    assert Group.from_rows(group.to_row()).error == "ValueError: no"
    if policy == "retry":
        assert list(group.samples) == [1], "the sample that was scored is kept"


EQUAL = {"rewards": {"right": 1.0}}


def test_a_step_that_the_filter_leaves_empty_starves() -> None:
    ledger = make(filter_metrics=("right",), max_refills=1, n_positions=100)
    for dropped in range(3):
        assert (ledger.starves, ledger.table.filtered) == (False, dropped)
        fill_each(ledger, lease(ledger, 1), **EQUAL)
    assert ledger.starves, "3 groups are more than one refill of 2"
    stored = StoredLedger()
    stored.write(ledger)
    assert stored.restore(ledger.params).starves, "a controller that starts again still knows"
    assert not stored.restore(replace(ledger.params, max_refills=0)).starves
    fill_each(ledger, lease(ledger, 2))
    assert not ledger.starves, "the step is full after all"
    train(ledger)
    assert ledger.table.filtered == 0
    ledger.table.filtered = 3
    ledger.rewind(0)
    assert ledger.table.filtered == 0


def test_no_refill_is_asked_for_where_no_prompt_or_no_step_is_left() -> None:
    ledger = make(filter_metrics=("right",), max_refills=1, n_positions=4)
    for _ in range(4):
        fill_each(ledger, lease(ledger, 1), **EQUAL)
    assert (ledger.table.exhausted, ledger.starves) == (True, False)
    ledger = make(filter_metrics=("right",), max_refills=1, n_positions=20, max_steps=1)
    held = lease(ledger, 4)
    fill_each(ledger, held[:2])
    batch(ledger)
    ledger.table.filtered = 3
    assert not ledger.starves, "the step that is trained is the last one"


def test_a_ledger_stored_before_refills_were_counted_has_none() -> None:
    stored, ledger = StoredLedger(), make()
    stored.write(ledger)
    del stored.header["filtered"]
    assert stored.restore(ledger.params).table.filtered == 0


def greedy_group(**changes: Any) -> tuple[Ledger, Group]:
    """A group of two sampled answers with scores of 0 and 1, of which the greedy one is still missing."""
    ledger = make(greedy=True, **changes)
    (group,) = lease(ledger, 1)
    for index in range(2):
        ledger.push(group.id, group.lease_id or "", index, make_header(index, 0), 10)
    assert group.state is GroupState.LEASED
    return ledger, group


def push_greedy(ledger: Ledger, group: Group, version: int = 0, **changes: Any) -> None:
    header = make_header(2, version, baseline=True, **changes)
    assert ledger.push(group.id, group.lease_id or "", 2, header, 10).accepted


def test_a_group_is_ready_with_its_greedy_sample_which_counts_as_no_sample() -> None:
    ledger, group = greedy_group()
    for index, baseline in ((2, False), (3, True)):
        header = make_header(index, 0, baseline=baseline)
        assert ledger.push(group.id, group.lease_id or "", index, header, 10).code is ErrorCode.BAD_REQUEST
    push_greedy(ledger, group, score=0.25, source="gsm8k")
    (other,) = lease(ledger, 1)
    fill(ledger, other)
    table = build_table(0, 0, 1, batch(ledger).groups)
    assert table.group == [0, 0, 0, 1, 1, 1]
    assert table.baseline == [False, False, True] * 2
    assert table.source == ["", "", "gsm8k", "", "", ""]
    assert table.score == [0.0, 1.0, 0.25, 0.0, 1.0, 0.0]
    assert table.sampled == [0, 1, 3, 4]
    ledger.commit(0)
    assert ledger.table.status().staleness == {0: 4}


@pytest.mark.parametrize(
    ("policy", "changes", "state", "reason"),
    [
        ("retry", {"score": None, "error": "no"}, GroupState.WAITING, None),
        ("drop", {"score": None, "error": "no"}, GroupState.DROPPED, DropReason.REWARD_ERROR),
        ("mask", {"score": None, "error": "no"}, GroupState.DROPPED, DropReason.REWARD_ERROR),
        ("mask", {"finish_reason": "overlong"}, GroupState.DROPPED, DropReason.OVERLONG),
    ],
)
def test_without_the_score_of_its_greedy_sample_no_group_is_trained(
    policy: Any, changes: dict[str, Any], state: GroupState, reason: DropReason | None
) -> None:
    ledger, group = greedy_group(on_reward_error=policy)
    push_greedy(ledger, group, **changes)
    assert (group.state, group.reason) == (state, reason)
    if policy == "retry":
        assert sorted(group.samples) == [0, 1], "what was scored is kept"
        (again,) = lease(ledger, 1)
        push_greedy(ledger, again)
        assert group.state is GroupState.READY


def test_a_greedy_sample_that_differs_is_a_signal() -> None:
    for greedy, state in ((1.0, GroupState.DROPPED), (0.0, GroupState.READY)):
        ledger = make(greedy=True, filter_metrics=("right",))
        (group,) = lease(ledger, 1)
        for index in range(2):
            header = make_header(index, 0, rewards={"right": 1.0})
            ledger.push(group.id, group.lease_id or "", index, header, 10)
        push_greedy(ledger, group, rewards={"right": greedy})
        assert group.state is state


def test_a_group_is_as_old_as_its_greedy_sample() -> None:
    ledger = make(greedy=True, staleness_bound=3)
    (group,) = lease(ledger, 1)
    for index in range(2):
        ledger.push(group.id, group.lease_id or "", index, make_header(index, 1), 10)
    push_greedy(ledger, group, version=0)
    assert group.deadline == 3


@pytest.mark.parametrize(
    ("before", "after"), [((2, False), (2, True)), ((2, True), (3, False)), ((2, False), (3, False))]
)
def test_groups_of_another_size_are_made_again(before: tuple[int, bool], after: tuple[int, bool]) -> None:
    """A job that goes on with another estimator, or larger groups."""
    ledger, stored = make(n_samples=before[0], greedy=before[1], keep_payloads=True), StoredLedger()
    fill_each(ledger, lease(ledger, 4))
    assert len(batch(ledger).groups) == 2
    stored.write(ledger)
    again = stored.restore(replace(ledger.params, n_samples=after[0], greedy=after[1]))
    again.table.remake_misfits()
    assert (again.table.ready, len(again.table.by_state[GroupState.WAITING])) == (0, 4)
    fill_each(again, lease(again, 4))
    assert len(batch(again).groups) == 2
    again.commit(0)
    stored.write(again)
    third = stored.restore(ledger.params)
    third.rewind(0)
    third.table.remake_misfits()
    assert not third.table.ready, "what was trained with the other size is not reused"


def test_samples_stored_before_there_were_greedy_ones_are_read() -> None:
    ledger = make()
    (group,) = lease(ledger, 1)
    fill(ledger, group)
    old = [row[:-1] for row in group.samples_row()]
    assert Group.from_rows(group.to_row(), old).samples == group.samples


def test_overlong_samples_stay_out_of_training() -> None:
    ledger = make()
    first, second = lease(ledger, 2)
    fill(ledger, first, finish_reason="overlong")
    assert first.reason is DropReason.OVERLONG
    lease_id = second.lease_id or ""
    ledger.push(second.id, lease_id, 0, make_header(0, 0, finish_reason="overlong"), 10)
    ledger.push(second.id, lease_id, 1, make_header(1, 0), 10)
    (third,) = lease(ledger, 1)
    fill(ledger, third)
    assembled = batch(ledger)
    table = build_table(0, 0, 1, assembled.groups)
    assert table.score == [None, 1.0, 0.0, 1.0]
    assert table.group_ids == ["e0-p1", "e0-p2"]


def test_a_batch_has_a_bounded_number_of_rewards_whatever_names_a_replica_invents() -> None:
    ledger = make()
    for group in lease(ledger, 2):
        for index in range(2):
            rewards = {f"{group.id}.{index}.{i}": 1.0 for i in range(MOST_REWARDS)}
            assert group.lease_id is not None
            made = make_header(index, 0, rewards=rewards)
            assert ledger.push(group.id, group.lease_id, index, made, 10).accepted
    assembled = batch(ledger)
    assert len(build_table(0, 0, 1, assembled.groups).rewards) == MOST_REWARDS


def test_a_step_waits_for_what_is_due() -> None:
    ledger = make(n_positions=20)
    due = lease(ledger, 2)
    fill_each(ledger, lease(ledger, 2))
    train(ledger)
    fill_each(ledger, lease(ledger, 2, version=1), version=1)
    waiting = ledger.assemble(now=0.0)
    assert isinstance(waiting, WaitingStep)
    assert waiting.stragglers == due
    fill_each(ledger, due)
    assert train(ledger) == due


def test_stragglers_are_dropped_after_the_time_out_if_asked_for() -> None:
    ledger = make(n_positions=20, on_stale="drop", straggler_timeout=5.0)
    due = lease(ledger, 2)
    fill_each(ledger, lease(ledger, 2))
    train(ledger)
    others = lease(ledger, 2, version=1)
    fill_each(ledger, others, version=1)
    assert isinstance(ledger.assemble(now=0.0), WaitingStep)
    assert isinstance(ledger.assemble(now=4.0), WaitingStep)
    assembled = batch(ledger, now=6.0)
    assert assembled.groups == others
    assert {group.reason for group in due} == {DropReason.STALE}


def test_no_step_waits_for_stragglers_while_there_is_no_trainer() -> None:
    ledger = make(on_stale="drop", straggler_timeout=10.0, staleness_bound=0)
    fill_each(ledger, lease(ledger, 2)[:1])
    assert isinstance(ledger.assemble(now=0.0), WaitingStep)
    ledger.table.abandon_step()  # the next trainer comes an hour later
    ledger.rewind(0)
    (again,) = lease(ledger, 1)
    assert isinstance(ledger.assemble(now=3600.0), WaitingStep)
    assert again.state is GroupState.LEASED
    ledger.assemble(now=3611.0)
    assert again.reason is DropReason.STALE


def test_the_end_of_the_data_makes_a_short_last_step() -> None:
    ledger = make(n_positions=3)
    assert ledger.table.total_steps == 2
    fill_each(ledger, lease(ledger, 3))
    assert len(train(ledger)) == 2
    assert len(train(ledger)) == 1
    assert ledger.table.finished
    assert ledger.table.status().states["trained"] == 3


def test_no_more_is_leased_than_the_last_steps_need() -> None:
    ledger = make(max_steps=1)
    assert len(lease(ledger, 10)) == 2
    assert ledger.close()
    assert ledger.table.status().dropped == {"surplus": 2}
    assert ledger.table.finished


def test_epochs_follow_each_other_as_one_stream() -> None:
    ledger = make(n_positions=3, data_passes=2)
    assert [group.id for group in lease(ledger, 4)] == ["e0-p0", "e0-p1", "e0-p2", "e1-p0"]


def test_committing_what_was_not_assembled_is_refused() -> None:
    with pytest.raises(ApiError, match="step 0 is next and not assembled") as error:
        make().commit(0)
    assert error.value.code is ErrorCode.WRONG_STEP


def test_an_abandoned_step_is_assembled_again() -> None:
    ledger = make()
    groups = lease(ledger, 2)
    fill_each(ledger, groups)
    assert isinstance(ledger.assemble(now=0.0), Assembled)
    assert ledger.table.abandon_step() == 2
    assert ledger.table.ready == 2
    assert train(ledger) == groups


def test_rewind_reuses_what_the_checkpoint_can_have_made() -> None:
    ledger = make(keep_payloads=True, staleness_bound=2)
    old = lease(ledger, 6)
    fill_each(ledger, old)
    train(ledger)
    ledger.checkpoint(0)
    train(ledger)
    new = lease(ledger, 2, version=1)
    fill_each(ledger, new, version=1)
    ledger.rewind(0)
    assert (ledger.table.committed, ledger.table.timeline) == (0, 1)
    assert {group.state for group in old} == {GroupState.READY}
    assert {group.state for group in new} == {GroupState.WAITING}
    assert ledger.table.status().staleness == {}
    assert ledger.table.status().created == 8


def test_rewind_generates_again_what_lost_its_payload() -> None:
    ledger = make()
    groups = lease(ledger, 2)
    fill_each(ledger, groups)
    train(ledger)
    assert {name for name, _ in ledger.table.take_changes().dropped_payloads} == {"e0-p0", "e0-p1"}
    ledger.rewind(0)
    assert {group.state for group in groups} == {GroupState.WAITING}


def test_a_snapshot_alone_resumes_the_job() -> None:
    ledger = make(keep_payloads=True)
    groups = lease(ledger, 4)
    fill_each(ledger, groups[:3])
    train(ledger)
    snapshot = ledger.snapshot(1)
    assert (snapshot.frontier, snapshot.untrained) == (4, [2, 3])
    resumed = make()
    resumed.begin_from(snapshot)
    assert resumed.table.committed == 1
    status = resumed.table.status()
    assert (status.created, status.states["durable"], status.states["waiting"]) == (4, 2, 2)
    assert [group.id for group in lease(resumed, 4, version=1)] == ["e0-p2", "e0-p3", "e0-p4", "e0-p5"]


def test_a_job_goes_on_with_rows_that_came_later() -> None:
    ledger, stored = make(n_positions=4, keep_payloads=True), StoredLedger()
    groups = lease(ledger, 4)
    fill_each(ledger, groups[:2])
    train(ledger)
    stored.write(ledger)
    snapshot = ledger.snapshot(1)
    longer = replace(ledger.params, n_positions=9, grown=(2, 4))
    resumed = Ledger(GroupTable(longer))
    resumed.begin_from(snapshot)
    for goes_on in (resumed, stored.restore(longer)):
        assert {group.id for group in lease(goes_on, 9, version=1)} >= {"e0-p4", "e0-p5"}
    with pytest.raises(ApiError, match="4 prepared rows, this job has 9"):
        make(n_positions=9, grown=(2,)).begin_from(snapshot)
    with pytest.raises(ApiError, match="4 prepared rows, this job has 9"):
        Ledger(GroupTable(longer)).begin_from(snapshot.model_copy(update={"frontier": 5}))
    stored.header["frontier"] = 5
    with pytest.raises(OtherSourcesError, match="its first pass over 4 rows is over"):
        stored.restore(longer)


def resumed_with(stored: StoredLedger, ledger: Ledger, **changes: Any) -> Ledger:
    """The job as the next controller finds it, with other keys of the configuration."""
    table = stored.restore(replace(ledger.params, **changes)).table
    table.remake_misfits()
    go_on_changed(table, stored.header)
    return Ledger(table)


def to_the_end(ledger: Ledger) -> int:
    """Train all steps that are left; the samples that were trained beyond the bound."""
    while not ledger.table.finished:
        version = ledger.table.committed
        for group in lease(ledger, 20, version):
            fill(ledger, group, version)
        train(ledger)  # which waits for nothing that will not come
    return ledger.table.totals.over_bound


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("changes", [{"groups_per_step": 1}, {"groups_per_step": 4}, {"staleness_bound": 0}])
def test_a_job_goes_on_with_other_steps_or_another_bound_and_trains_every_row(
    changes: dict[str, Any], back: bool
) -> None:
    ledger, stored = make(n_positions=21, keep_payloads=True, staleness_bound=2), StoredLedger()
    for _ in range(2):
        for group in lease(ledger, 8, ledger.table.committed):
            fill(ledger, group, ledger.table.committed)
        train(ledger)
    stored.write(ledger)
    changed = resumed_with(stored, ledger, **changes)
    if back:
        changed.rewind(1)
    done, per_step = (1 if back else 2), changed.params.groups_per_step
    assert changed.table.total_steps == done + -(-(21 - 2 * done) // per_step)
    assert to_the_end(changed) == 0
    status = changed.table.status()
    assert (status.states["trained"] + status.states["durable"], status.dropped) == (21, {})
    snapshot = changed.snapshot(changed.table.committed)
    again = make(**{**{"n_positions": 21, "staleness_bound": 2}, **changes})
    again.begin_from(snapshot)
    assert again.table.total_steps == changed.table.total_steps
    assert again.table.finished


def test_a_job_goes_on_with_fewer_groups_ahead() -> None:
    ledger, stored = make(n_positions=40, oversample=3.0, staleness_bound=1), StoredLedger()
    for group in lease(ledger, 12):
        fill(ledger, group)
    stored.write(ledger)
    changed = resumed_with(stored, ledger, oversample=1.0)
    assert changed.table.ready == 4, "as many as can be trained in time"
    assert to_the_end(changed) == 0


def test_a_job_whose_last_step_was_trained_goes_on_with_further_ones() -> None:
    ledger, stored = make(n_positions=20, max_steps=2), StoredLedger()
    to_the_end(ledger)
    stored.write(ledger)
    longer = resumed_with(stored, ledger, max_steps=5)
    assert not longer.table.finished
    to_the_end(longer)
    assert longer.table.committed == 5


def test_other_rows_of_the_same_number_are_noticed_in_the_store() -> None:
    ledger, stored = make(data="a"), StoredLedger()
    lease(ledger, 1)
    stored.write(ledger)
    assert [resumed_with(stored, ledger, data=data).table.other_rows for data in "ab"] == [False, True]


def test_on_policy_a_hung_group_is_a_straggler_too() -> None:
    """With S = 0 everything leased is due, and fewer than B groups are ready while one hangs."""
    ledger = make(n_positions=20, staleness_bound=0, on_stale="drop", straggler_timeout=5.0)
    done, hung = lease(ledger, 2)
    fill(ledger, done)
    waiting = ledger.assemble(now=0.0)
    assert isinstance(waiting, WaitingStep)
    assert waiting.stragglers == [hung]
    assert isinstance(ledger.assemble(now=6.0), WaitingStep)
    assert hung.reason is DropReason.STALE
    (instead,) = lease(ledger, 1)
    fill(ledger, instead)
    assert train(ledger) == [done, instead]


def test_groups_that_were_held_together_are_not_dropped_for_a_crash() -> None:
    """Crash after crash with two groups in hand: the last attempt of each is made alone, and so it ends well."""
    ledger = make(max_attempts=2)
    both = lease(ledger, 2, request="together")
    ledger.replica_gone("r")
    (first,) = lease(ledger, 2, request="first")
    assert first in both, "a suspect comes alone"
    assert not lease(ledger, 1, request="more"), "and stays alone"
    assert len(lease(ledger, 1, request="of another", replica="other")) == 1
    fill(ledger, first, version=0)
    assert first.state is GroupState.READY
    assert ledger.table.status().dropped == {}


def test_a_suspect_waits_for_an_idle_replica() -> None:
    ledger = make(max_attempts=2)
    (suspect,) = lease(ledger, 1, request="first")
    ledger.replica_gone("r")
    ledger.release(lease(ledger, 1, request="elsewhere", replica="other")[0].lease_id or "")
    suspect_again = lease(ledger, 1, request="again", replica="other")
    assert suspect_again == [suspect]
    ledger.replica_gone("other", failed=False)
    assert suspect.state is GroupState.WAITING, "a pre-emption is nobody's fault"
    stored = StoredLedger()
    stored.write(ledger)
    restored = stored.restore(ledger.params)
    (alone,) = lease(restored, 2, request="after a restart")
    assert alone.id == suspect.id
    restored.replica_gone("r")
    assert (alone.state, alone.reason) == (GroupState.DROPPED, DropReason.POISON)


def test_expired_leases_and_silent_replicas_cost_no_attempt() -> None:
    ledger = make(max_attempts=1, lease_timeout=10.0)
    for attempt in range(5):
        (group,) = lease(ledger, 1, request=f"expired-{attempt}")
        assert ledger.expire(now=100.0) == 1
        (group,) = lease(ledger, 1, request=f"silent-{attempt}")
        ledger.replica_gone("r", failed=False)
    assert (group.state, group.crashes, group.failures) == (GroupState.WAITING, 0, 0)
