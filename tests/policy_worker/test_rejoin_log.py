"""What a trainer remembers, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from policy_worker.rejoin_log import MOST, REMEMBERED, RejoinLog
from schema.wire import messages as m
from schema.wire.batch import StepTable
from schema.wire.messages.recovery import DeclareRequest
from schema.wire.weights import Publication


def registered(resume_step: int | None = 0, committed: int = 0) -> RejoinLog:
    history = RejoinLog()
    request = m.RegisterRequest(request_id="request-1", role="policy", name="p", resume_step=resume_step)
    reply = m.RegisterReply.model_construct(
        timeline=2, timeline_began=1, committed_steps=committed, policy_epoch=5, publication=None
    )
    history.registered(request, reply)
    return history


def table(step: int) -> StepTable:
    columns: dict[str, Any] = {
        "score": [1.0], "rewards": {"r": [1.0]}, "prompt_tokens": [1], "response_tokens": [1], "total_tokens": [2],
        "oldest_version": [step], "newest_version": [step], "finish_reason": ["stop"],
    }  # fmt: skip
    return StepTable(
        step=step, timeline=2, policy_epoch=5, group_ids=[f"e0-p{step}"], group=[0], index=[0], **columns
    )


def reply(committed: int, durable: int) -> m.CommitReply:
    return m.CommitReply(
        committed_steps=committed, total_steps=9999, publish=True, finished=False, durable_steps=durable
    )


def train(history: RejoinLog, first: int, last: int, *, durable: bool) -> None:
    for step in range(first, last):
        history.took(table(step))
        history.applied(step, {"loss": 1.0}, 10.0 + step)
        history.committed(reply(step + 1, step + 1 if durable else 0))


def published(number: int, *collectable: int) -> m.PublishReply:
    publication = Publication(
        id=number, version=number, timeline=2, uri="u", manifest_hash="m", content_hash="c", n_bytes=1
    )
    return m.PublishReply(publication=publication, collectable=list(collectable))


def test_a_step_is_remembered_with_its_batch_from_the_moment_it_is_in_the_weights() -> None:
    history = registered()
    history.took(table(0))
    assert history.applied(0, {"loss": 2.0}, 7.0) == table(0).digest
    assert (history.steps, history.known) == (1, (0, 0))
    (trained,) = history.since(0)
    assert (trained.table, trained.metrics, trained.at) == (table(0), {"loss": 2.0}, 7.0)
    assert history.since(1) == []


def test_a_validation_is_remembered_with_its_step() -> None:
    history, record = (
        registered(),
        m.HeldOutLoss(version=1, at=1.0, samples=2, loss=2.0, accuracy=0.5, response_tokens_mean=3.0),
    )
    history.applied(0, {}, 7.0, [record])
    assert [trained.validations for trained in history.since(0)] == [(record,)]


def test_a_batch_of_another_step_is_not_taken_for_it() -> None:
    history = registered()
    history.took(table(0))
    assert history.applied(1, {}, 0.0) == ""


@pytest.mark.parametrize(("durable", "kept"), [(True, REMEMBERED), (False, MOST)])
def test_memory_is_bounded_by_what_is_on_disk(durable: bool, kept: int) -> None:
    history = registered()
    train(history, 0, MOST + 10, durable=durable)
    assert len(history.since(0)) == kept
    assert history.claim()["first"] == MOST + 10 - kept


def test_a_claim_is_what_a_declaration_carries() -> None:
    history = registered(resume_step=4, committed=4)
    train(history, 4, 6, durable=True)
    history.published(published(3))
    history.published(published(4, 3))
    history.heard(9)
    claim = history.claim()
    request = DeclareRequest(registration=history.registration, name="p", incarnation=1, policy_epoch=5, **claim)
    assert (request.timeline, request.began, request.first, request.steps) == (2, 1, 4, 6)
    assert [publication.id for publication in request.publications] == [4]
    assert request.newest_publication == 9
    assert history.known == (6, 4)


def test_a_registration_begins_a_new_history() -> None:
    history = registered()
    train(history, 0, 3, durable=False)
    history.registered(
        m.RegisterRequest(request_id="request-2", role="policy", name="p", resume_step=2),
        m.RegisterReply.model_construct(timeline=3, timeline_began=2, committed_steps=2, publication=None),
    )
    assert (history.steps, history.since(0), history.claim()["first"]) == (2, [], 2)
