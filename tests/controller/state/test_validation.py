from __future__ import annotations

import random

import pytest

from controller.state.validation.group import ValidationGroup, ValidationParams
from controller.state.validation.rounds import MAX_RESTARTS, Validation
from launcher.trackers.follow import validation_metrics
from schema.scores.summary import estimates_of
from schema.wire.messages import ErrorCode, ValidationRecord
from schema.wire.sample import SampleHeader
from tests.controller.drivers import make_header
from tests.support.metric_names import NEXT, undocumented

PARAMS = ValidationParams(n_rows=4, n_samples=2, freq=5, before=True, max_replicas=1, lease_timeout=10.0)


def make(**changes: object) -> Validation:
    fields = {name: getattr(PARAMS, name) for name in PARAMS.__slots__}
    return Validation(ValidationParams(**{**fields, **changes}))


def begun(version: int, **changes: object) -> Validation:
    """One in which a version was published."""
    validation = make(**changes)
    validation.published(version, final=False)
    return validation


def lease(
    validation: Validation, version: int, n: int = 8, replica: str = "a", now: float = 0.0, request: str = ""
) -> list[ValidationGroup]:
    name = request or f"request-{random.random()}"
    return validation.lease(replica, name, version, version + 1, n, now)


def finish(validation: Validation, groups: list[ValidationGroup], version: int, **changes: object) -> None:
    for group in list(groups):
        name, lease_id = validation.group_name(group), group.lease_id or ""
        for index in range(PARAMS.n_samples):
            header = make_header(index, version, **changes)  # type: ignore[arg-type]
            outcome = validation.push(name, lease_id, index, header, 1.0)
            assert outcome.accepted, outcome


def test_a_loss_and_scores_of_a_version_are_one_record() -> None:
    """In supervised training that generates; whichever comes first, and each counts once."""

    def loss(version: int, value: float) -> ValidationRecord:
        return ValidationRecord(
            version=version, at=1.0, samples=7, loss=value, accuracy=0.5, response_tokens_mean=9.0
        )

    validation = make(freq=2)
    for version in (0, 2):
        if version:
            validation.record(loss(version, 3.0))
        validation.published(version, final=version == 2)
        assert validation.due == version, "a loss alone is no answer"
        finish(validation, lease(validation, version), version)
        validation.record(loss(version, 3.0))
        validation.record(loss(version, 4.0))
    records = [(record.loss, record.samples, record.score_mean) for record in validation.records.values()]
    assert records == [(3.0, 8, 0.5)] * 2
    restored = Validation.restore(PARAMS, {name: validation.row(name) for name in validation.take_changes()[0]})
    assert restored.records == validation.records


@pytest.mark.parametrize(("before", "due"), [(True, 0), (False, None)])
def test_the_initial_weights_are_validated_if_asked_for(before: bool, due: int | None) -> None:
    validation = begun(0, before=before)
    assert validation.due == due


def test_rounds_are_due_by_frequency_and_at_the_end() -> None:
    validation = make(before=False)
    found = []
    for version in range(1, 13):
        validation.published(version, final=version == 12)
        if validation.due is not None:
            found.append(version)
            finish(validation, lease(validation, version), version)
    assert found == [5, 10, 12]
    assert list(validation.records) == [5, 10, 12]


def test_a_due_version_that_was_never_published_is_validated_with_the_next_one() -> None:
    validation = begun(4, before=False)
    validation.published(6, final=False)
    assert validation.due == 5
    assert lease(validation, 4) == []
    finish(validation, lease(validation, 6), 6)
    assert list(validation.records) == [6]


def test_overtaken_rounds_become_one() -> None:
    validation = make()
    for version in (0, 5, 10):
        validation.published(version, final=False)
    assert lease(validation, 5) == []
    finish(validation, lease(validation, 10), 10)
    assert list(validation.records) == [10]
    assert not validation.pending


def test_the_final_version_is_validated_once() -> None:
    validation = begun(5, before=False)
    finish(validation, lease(validation, 5), 5)
    validation.published(5, final=True)
    assert not validation.pending


def test_a_final_round_that_is_running_already_is_not_due_again() -> None:
    validation = begun(5, before=False)
    groups = lease(validation, 5)
    validation.published(5, final=True)
    validation.published(5, final=True)
    finish(validation, groups, 5)
    assert not validation.pending


def test_other_versions_and_more_replicas_than_allowed_take_no_part() -> None:
    validation = begun(0, n_rows=6)
    assert len(lease(validation, 0, n=2, replica="a")) == 2
    assert lease(validation, 0, n=2, replica="b") == []
    assert lease(validation, 1, n=2, replica="a") == []
    assert len(lease(validation, 0, n=9, replica="a")) == 4
    both = begun(0, n_rows=6, max_replicas=2)
    assert len(lease(both, 0, n=2, replica="a")) == len(lease(both, 0, n=2, replica="b")) == 2
    assert lease(both, 0, n=2, replica="c") == []


def test_a_lease_is_as_large_as_the_batch_size_says() -> None:
    validation = begun(0, lease_size=3)
    assert len(lease(validation, 0, n=99)) == 3


def test_the_same_request_gets_the_same_groups() -> None:
    validation = begun(0)
    first = lease(validation, 0, n=2, request="one-request")
    assert lease(validation, 0, n=2, request="one-request") == first
    assert len({group.position for group in (*first, *lease(validation, 0, n=2))}) == 4


def test_samples_of_other_versions_are_refused() -> None:
    validation = make()
    validation.published(3, final=True)
    group = lease(validation, 3)[0]
    name, lease_id = validation.group_name(group), group.lease_id or ""
    wrong = validation.push(name, lease_id, 0, make_header(0, 2), 0.0)
    assert wrong.code is ErrorCode.CONFLICT
    mixed = make_header(0, 3).model_copy(update={"oldest_version": 2})
    assert validation.push(name, lease_id, 0, mixed, 0.0).code is ErrorCode.CONFLICT
    assert validation.push(name, "wrong", 0, make_header(0, 3), 0.0).code is ErrorCode.LEASE_LOST
    assert validation.push(name, lease_id, 1, make_header(0, 3), 0.0).code is ErrorCode.BAD_REQUEST
    assert validation.push(name, lease_id, 0, make_header(0, 3), 0.0).accepted
    assert validation.push(name, lease_id, 0, make_header(0, 3), 0.0).duplicate


@pytest.mark.parametrize("name", ["v1-p\u00b2", "v1-p", "v1-p-1", "v1-p99", "v1", "v2-p0", "v", "vv1-p0"])
def test_groups_that_are_none_have_no_lease(name: str) -> None:
    validation = begun(0)
    (group,) = lease(validation, 0, n=1)
    assert validation.round_id == 1
    outcome = validation.push(name, group.lease_id or "", 0, make_header(0, 0), 1.0)
    assert outcome.code is ErrorCode.LEASE_LOST


def test_the_last_push_of_a_round_can_be_repeated() -> None:
    validation = begun(0, n_rows=1)
    (group,) = lease(validation, 0)
    name, lease_id = validation.group_name(group), group.lease_id or ""
    finish(validation, [group], 0)
    assert validation.push(name, lease_id, 1, make_header(1, 0), 0.0).duplicate
    assert validation.records[0].samples == 2


def test_a_failed_reward_counts_as_an_error_and_not_as_zero() -> None:
    validation = begun(0, n_rows=2)
    good, bad = lease(validation, 0)
    finish(validation, [good], 0, score=1.0, rewards={"right": 1.0})
    finish(validation, [bad], 0, score=None, error="timeout", rewards={})
    record = validation.records[0]
    assert (record.samples, record.errors, record.score_mean) == (2, 2, 1.0)
    assert record.rewards_mean == {"right": 1.0}


def test_a_round_reports_estimates_by_source() -> None:
    """Two samples to each of four prompts: `pass_score` and extracted answers decide what passes and who votes."""
    validation = begun(0, pass_score=0.5)
    for group, source, scores in zip(
        lease(validation, 0), ("math", "math", "code", ""), ((0.5, 0.0), (0.0, 0.0), (1.0, 1.0), (1.0, None)),
        strict=True,
    ):  # fmt: skip
        for index, score in enumerate(scores):
            header = make_header(index, 0, score=score, error=None if score is not None else "timeout")
            header = header.model_copy(update={"source": source, "answer": str(index) if source == "math" else None})
            name = validation.group_name(group)
            assert validation.push(name, group.lease_id or "", index, header, 1.0).accepted
    record = ValidationRecord.model_validate_json(validation.records[0].model_dump_json())
    assert record == validation.records[0]
    assert record.scores is not None
    assert record.sources.keys() == {"math", "code"}
    values = {name: (e.value, e.prompts) for name, e in estimates_of(record.scores).items()}
    assert values == {
        "mean@2": (0.5625, 4), "maj@2": (0.5625, 4), "pass@1": (0.625, 4), "pass@2": (2 / 3, 3), "best@2": (0.625, 4)
    }  # fmt: skip
    assert (record.scores.errors, record.errors) == (1, 1)
    assert record.sources["code"].majority is None
    metrics = validation_metrics(record)
    assert metrics["validation/source/math/pass@2"] == 0.5
    assert undocumented(metrics, NEXT) == set()


def test_each_set_has_samples_a_passing_score_and_estimates_of_its_own() -> None:
    sets = {"labels": ("a", "b", "a", "b"), "samples": {"a": 1, "b": 3}, "pass_scores": {"a": 1.0, "b": 0.5}}
    validation = begun(0, **sets)
    assert len(validation.samples_of(1)) == 8
    groups = lease(validation, 0)
    assert validation.n_samples == 8
    for group, source, scores in zip(groups, ("b", "x", "", "x"), ((0.75,), (0.75, 0.0, 0.0), (1.0,), (0.0,) * 3),
        strict=True,
    ):  # fmt: skip
        name, lease_id = validation.group_name(group), group.lease_id or ""
        for index, score in enumerate(scores):
            header = make_header(index, 0, score=score).model_copy(update={"source": source})
            assert validation.push(name, lease_id, index, header, 1.0).accepted
        assert validation.push(name, lease_id, len(scores), make_header(len(scores), 0), 1.0).code
    record = validation.records[0]
    assert record.sources.keys() == {"a", "b", "x"}, "the rows of `a` that call themselves `b` are none of set `b`"
    assert record.sources["b"] == record.sources["x"]
    metrics = validation_metrics(record)
    assert metrics["validation/source/a/mean@1"] == 0.875
    assert metrics["validation/source/a/pass@1"] == 0.5
    assert metrics["validation/source/b/pass@3"] == 0.5
    assert metrics["validation/mean@3"] == pytest.approx(0.5)


def test_without_any_score_there_is_no_mean() -> None:
    validation = begun(0, n_rows=1)
    finish(validation, lease(validation, 0), 0, score=None, error="timeout", rewards={})
    assert validation.records[0].score_mean is None


def test_a_round_goes_on_at_another_replica_of_the_same_version() -> None:
    validation = begun(0)
    groups = lease(validation, 0, n=4, replica="a")
    finish(validation, groups[:2], 0)
    assert validation.replica_gone("a", 1.0) == 2
    rest = lease(validation, 0, replica="b")
    assert [group.position for group in rest] == [2, 3]
    finish(validation, rest, 0)
    assert validation.records[0].samples == 8


def test_a_round_whose_version_nobody_holds_begins_again_and_ends_in_the_end() -> None:
    validation = begun(5, before=False)
    for version in range(5, 5 + MAX_RESTARTS):
        finish(validation, lease(validation, version, n=1), version)
    last = lease(validation, 9, n=1)
    assert len(last) == PARAMS.n_rows
    finish(validation, last, 9)
    assert list(validation.records) == [9]


def test_expired_leases_go_to_others_and_a_poison_prompt_ends_as_errors() -> None:
    validation = begun(0, n_rows=1, max_attempts=2)
    assert len(lease(validation, 0, now=0.0)) == 1
    assert validation.expire(10.0, 1.0) == 0
    assert validation.expire(10.1, 1.0) == 1
    assert len(lease(validation, 0, now=11.0)) == 1
    validation.expire(30.0, 1.0)
    assert validation.records[0].errors == 2
    assert not validation.pending


def test_beats_renew_what_they_list_and_forget_what_they_miss_twice() -> None:
    validation = begun(0)
    kept, forgotten = lease(validation, 0, n=2)
    kept_id, forgotten_id = kept.lease_id or "", forgotten.lease_id or ""
    assert validation.renew("a", [kept_id, "unknown"], 9.0) == ["unknown"]
    assert forgotten.state == "leased"
    validation.renew("a", [kept_id], 9.0)
    assert forgotten.state == "waiting"
    assert validation.renew("a", [kept_id, forgotten_id], 9.0) == [forgotten_id]
    assert validation.expire(15.0, 1.0) == 0


def test_a_rewind_forgets_what_was_measured_on_later_versions() -> None:
    validation = begun(0)
    finish(validation, lease(validation, 0), 0)
    validation.published(5, final=False)
    finish(validation, lease(validation, 5), 5)
    validation.published(10, final=False)
    lease(validation, 10)
    validation.rewind(4)
    assert list(validation.records) == [0]
    assert not validation.pending
    validation.published(5, final=False)
    assert validation.due == 5


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    """Replicas come, go, update and repeat themselves: every round covers every row once, and restoring from
    the written rows gives the same state after every event."""
    chance = random.Random(seed)
    validation = make(n_rows=5, max_replicas=chance.choice([1, 2]), max_attempts=100)
    rows: dict[str, object] = {}
    held: dict[str, list[tuple[str, str, int]]] = {"a": [], "b": [], "c": []}
    version_of = dict.fromkeys(held, 0)
    published, now = -1, 0.0
    for _ in range(400):
        now += chance.random()
        name = chance.choice(sorted(held))
        event = chance.random()
        if event < 0.05:
            published += 1
            validation.published(published, final=False)
        elif event < 0.2 and not held[name]:
            version_of[name] = max(published, 0)
        elif event < 0.5:
            granted = validation.lease(
                name, f"r{now}", version_of[name], version_of[name] + 1, chance.choice([1, 2, 5]), now
            )
            for group in granted:
                assert validation.pinned == version_of[name]
                assert group.lease_id is not None
                held[name].append((validation.group_name(group), group.lease_id, version_of[name]))
        elif event < 0.9 and held[name]:
            group_name, lease_id, version = held[name].pop(0)
            for index in range(PARAMS.n_samples):
                header: SampleHeader = make_header(index, version)
                assert validation.push(group_name, lease_id, index, header, now).accepted
                assert validation.push(group_name, lease_id, index, header, now).duplicate
        elif event < 0.93:
            validation.replica_gone(name, now)
            held[name] = []
        holders = {group.replica_id for group in validation.groups if group.state == "leased"}
        assert len(holders) <= validation.params.max_replicas
        assert all(
            {header.newest_version for header in group.samples.values()} <= {validation.pinned}
            for group in validation.groups
            if validation.running
        )
        changed, removed = validation.take_changes()
        rows.update({row: validation.row(row) for row in changed})
        for row in removed:
            rows.pop(row, None)
        again = Validation.restore(validation.params, rows)
        assert again.groups == validation.groups
        assert again.records == validation.records
        assert again.row("header") == validation.row("header")
    for record in validation.records.values():
        assert (record.samples, record.errors) == (10, 0)
    assert seed or validation.records
