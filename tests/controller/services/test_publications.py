"""What replicas report of weight versions, the anchors that follow, and what people and Prometheus see of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from controller.client import calls as api
from controller.state.update_reports import BUCKETS, DETAIL, PUBLICATIONS, REPLICAS, STAGES, Histogram, Updates
from schema.wire import messages as m
from schema.wire.messages import ErrorCode
from schema.wire.weights import Publication
from tests.controller.conftest import Stage, asking, refused
from tests.controller.drivers import Rollout, Trainer, train_step
from tests.support.controller import make_config
from tests.support.metric_names import undocumented_families
from tests.support.waiting import until


def publication(number: int = 1) -> Publication:
    return Publication(
        id=number, version=number, timeline=0, uri=f"v{number}", manifest_hash="m", content_hash="c",
        n_bytes=1,
    )  # fmt: skip


def update(replica: str = "rollout-0.1", **fields: Any) -> m.UpdateReport:
    values = {"replica_id": replica, "incarnation": 1, "status": "applied", **fields}
    return m.UpdateReport.model_validate(values)


def publish(trainer: Trainer, version: int, begins: int | None = None, **fields: Any) -> m.PublishReply:
    kind = "full" if begins is None else "delta"
    request = trainer.publish_request(version).model_copy(update={"kind": kind, "begins": begins, **fields})
    return trainer.client.send(api.publish(request))


def report(rollout: Rollout, number: int, **fields: Any) -> None:
    mine = {"incarnation": rollout.reply.incarnation, **fields}
    rollout.client.send(api.report_update(number, update(rollout.reply.replica_id, **mine)))


# ---- the parts ------------------------------------------------------------------------------------------------


def test_memory_for_reports_is_bounded() -> None:
    updates = Updates()
    for number in range(1, PUBLICATIONS + 20):
        updates.report(publication(number), update(detail="x" * 4096), "store", 0.0)
    assert len(updates._reports) == PUBLICATIONS
    assert updates.of(19) == []
    newest = PUBLICATIONS + 19
    for number in range(REPLICAS + 5):
        updates.report(publication(newest), update(f"replica-{number}"), "store", 0.0)
    assert len(updates.of(newest)) == REPLICAS
    assert updates.of(newest)[-1].replica_id == f"replica-{REPLICAS + 4}"
    (kept,) = updates.of(newest - 1)
    assert len(kept.detail) == DETAIL


def test_a_report_that_comes_twice_counts_once() -> None:
    updates, said = Updates(), update(n_bytes=5, seconds={"pause": 0.5, "made up": 3.0})
    assert updates.report(publication(), said, "store", 1.0)
    assert not updates.report(publication(), said, "store", 2.0)
    assert updates.fetched_bytes == 5
    assert (updates.seconds["pause"].total, sum(updates.seconds["pause"].counts)) == (0.5, 1)
    assert set(updates.seconds) == set(STAGES), "labels are ours alone"
    assert updates.of(1)[-1].seconds == {"pause": 0.5}
    assert updates.report(publication(), update(n_bytes=6), "store", 3.0)
    assert [found.n_bytes for found in updates.of(1)] == [6]


@pytest.mark.parametrize("seconds", [-1.0, 1e308, float("inf"), float("nan")])
def test_seconds_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(ValidationError, match="seconds"):
        update(seconds={"pause": seconds})


def test_fallbacks_and_checks_are_counted() -> None:
    updates = Updates()
    updates.report(publication(), update("a", transport="collective", served_hash="c"), "collective", 0.0)
    updates.report(publication(), update("b", served_hash="other"), "collective", 0.0)
    updates.report(publication(), update("c", status="unreadable"), "collective", 0.0)
    updates.report(publication(), update("d", transport="collective", differs=True), "collective", 0.0)
    updates.report(publication(), update("e", served_hash="c", differs=True), "collective", 0.0)
    assert (updates.fallbacks, updates.unreadable) == (2, 1)
    assert (updates.checks[True], updates.checks[False]) == (1, 3)
    assert [found.checked for found in updates.of(1)] == [True, False, None, False, False]


def test_buckets_are_cumulative() -> None:
    histogram = Histogram()
    for value in (0.0005, 0.001, 0.002, 5000.0):
        histogram.add(value)
    rows = dict(histogram.cumulative())
    assert (rows["0.001"], rows["0.003"], rows[f"{BUCKETS[-1]:g}"], rows["+Inf"]) == (2, 3, 3, 4)


# ---- over HTTP ------------------------------------------------------------------------------------------------


def test_reports_are_listed_with_their_publication(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    publish(trainer, 0, begins=1, n_bytes=20, full_bytes=1000, changed=3, elements=500, metrics={"encode": 0.25})
    report(rollout, 2, mode="in_place", n_bytes=20, seconds={"fetch": 1.0, "pause": 0.004}, served_hash="c")
    first, second = stage.client(served).send(api.publications())
    assert (first.publication.id, first.updates, first.ratio) == (1, [], None)
    assert (second.publication.kind, second.publication.begins) == ("delta", 1)
    assert (second.ratio, second.density, second.seconds) == (0.02, 3 / 500, {"encode": 0.25})
    (found,) = second.updates
    assert (found.replica_id, found.mode, found.checked) == (rollout.reply.replica_id, "in_place", True)
    weights = stage.client(served).send(api.job()).weights
    assert weights is not None
    assert (weights.publication, weights.kind, weights.updated, weights.pause_s) == (2, "delta", 1, 0.004)
    rollout.leave()
    left = stage.client(served).send(api.job()).weights
    assert left is not None
    assert left.updated == 0, "status says: in use by 0 of 0 replicas"


def test_reports_of_strangers_are_refused(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    assert refused(report, rollout, 7).code is ErrorCode.NOT_FOUND
    assert refused(report, rollout, 1, incarnation=9).code is ErrorCode.STALE_INCARNATION
    as_trainer = update(trainer.reply.replica_id)
    assert refused(rollout.client.send, api.report_update(1, as_trainer)).code is ErrorCode.FORBIDDEN
    stolen = api.latest_publication(0, 0.0, trainer.reply.replica_id, 1)
    assert refused(rollout.client.send, stolen).code is ErrorCode.FORBIDDEN


def test_other_weights_than_the_trainers_are_an_error_that_is_shown(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    user = stage.client(served)
    report(rollout, 1, served_hash="c")
    assert user.send(api.job()).last_error is None
    report(rollout, 1, served_hash="other")
    error = user.send(api.job()).last_error or ""
    assert rollout.reply.replica_id in error
    assert "not those of version 0" in error
    assert 'cosmos_weights_checks_total{job="' in metrics(served.url)
    assert 'result="different"} 1.0' in metrics(served.url)


def metrics(url: str) -> str:
    with asking(url) as http:
        text = http.get("/metrics").raise_for_status().text
    assert undocumented_families(text) == set()
    return text


def test_metrics_of_weights_and_of_staleness(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    train_step(trainer, rollout, 0)
    publish(trainer, 1, begins=2, n_bytes=20, full_bytes=1000, metrics={"write": 2.0})
    report(rollout, 3, n_bytes=20, seconds={"pause": 0.004})
    text = metrics(served.url)
    for sample in (
        'stage="write"} 1.0',
        'le="0.01",stage="pause"} 1.0',
        'cosmos_weights_published_bytes_total{job="',
        'kind="delta"} 20.0',
        'cosmos_weights_ratio{job="',
        'mode="full",transport="store"} 1.0',
        'cosmos_staleness_bucket{job="',
    ):
        assert sample in text, sample
    trained = sum(stage.client(served).send(api.ledger()).staleness.values())
    assert f'le="+Inf"}} {float(trained)}' in text
    assert trained > 0


# ---- anchors --------------------------------------------------------------------------------------------------


def test_an_unreadable_version_is_followed_by_an_anchor(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    assert not publish(trainer, 0, begins=1).anchor
    report(rollout, 2, status="unreadable", detail="the file is torn")
    asking = publish(trainer, 0, begins=1)
    assert (asking.publication.id, asking.anchor) == (3, True)
    assert not publish(trainer, 0, begins=1).anchor, "4 gets it, written after it was announced"
    assert not publish(trainer, 0, begins=4).anchor, "5 begins with it"
    assert not publish(trainer, 0, begins=4).anchor
    weights = stage.client(served).send(api.job()).weights
    assert weights is not None
    assert weights.unreadable == 1


def test_a_trainer_that_attached_none_is_told_again(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    report(rollout, 1, status="unreadable")
    told = [publish(trainer, 0, begins=1).anchor for _ in range(4)]
    assert told == [True, False, True, False]
    assert not publish(trainer, 0).anchor, "a full one is what was wanted"
    assert not publish(trainer, 0, begins=6).anchor


def test_an_old_publication_that_comes_again_changes_nothing(stage: Stage) -> None:
    """It neither requests an anchor nor counts as told what only its first answer told."""
    served, trainer, rollout = stage.at_work(make_config(weight_sync={"keep": 1}))
    request = trainer.publish_request(0)
    first = trainer.client.send(api.publish(request))
    assert publish_until_gone(trainer, 3) == {2, 3, 4}

    def state() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        job = served.job
        return job.facts.to_record(), [entry.to_record() for entry in job.publications.recent(99)]

    def replay(told: list[int]) -> None:
        before = served.call(state)
        again = trainer.client.send(api.publish(request))
        assert (again.publication, again.anchor, again.collectable) == (first.publication, False, told)
        assert served.call(state) == before

    replay([4])
    report(rollout, 5, status="unreadable")
    assert ask(rollout, 5) is None, "what it was handed may go"
    replay([4])
    asking = publish(trainer, 0, begins=5)
    assert (asking.publication.id, asking.anchor, asking.collectable) == (6, True, [1])
    replay([1])
    assert not publish(trainer, 0, begins=5).anchor, "7 gets it"


def test_what_is_overtaken_by_an_anchor_wishes_for_none(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    publish(trainer, 0, begins=1)
    publish(trainer, 0, begins=2)
    report(rollout, 1, status="unreadable")
    assert not publish(trainer, 0, begins=2).anchor
    report(rollout, 2, status="unreadable")
    assert publish(trainer, 0, begins=2).anchor


def test_the_wish_survives_the_controller(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(controller={"heartbeat_timeout": 1000.0}))
    report(rollout, 1, status="unreadable")
    served.restart()
    assert publish(trainer, 0, begins=1).anchor


def test_a_trainer_that_publishes_nothing_is_told_in_a_heartbeat(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work(make_config(controller={"heartbeat_interval": 0.1}))
    assert "anchor" not in trainer.beat().commands
    report(rollout, 1, status="unreadable")
    until(lambda: "anchor" in trainer.beat().commands, "the request for a full version")
    assert "anchor" not in trainer.beat().commands  # not in every one
    until(lambda: "anchor" in trainer.beat().commands, "the request once more")
    assert trainer.publish(0).publication.id == 2  # the same version, in full
    assert not trainer.publish(0).anchor


def test_a_trainer_that_goes_on_is_told_in_the_answer_to_its_publication(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work(
        make_config(controller={"heartbeat_interval": 1000.0, "heartbeat_timeout": 5000.0})
    )
    report(rollout, 1, status="unreadable")
    assert "anchor" not in trainer.beat().commands
    request = trainer.publish_request(0).model_copy(update={"kind": "delta", "begins": 1})
    assert trainer.client.send(api.publish(request)).anchor


# ---- what was handed out --------------------------------------------------------------------------------------


def publish_until_gone(trainer: Trainer, n: int) -> set[int]:
    """Ids that the trainer is told to remove while it publishes n full versions."""
    return {number for _ in range(n) for number in publish(trainer, 0).collectable}


def ask(rollout: Rollout, newer_than: int = 0) -> Publication | None:
    mine = rollout.reply.replica_id, rollout.reply.incarnation
    return rollout.client.send(api.latest_publication(newer_than, 0.0, *mine))


@pytest.mark.parametrize("restart", [False, True])
def test_a_slow_replica_keeps_what_it_was_handed(stage: Stage, restart: bool) -> None:
    served = stage.serve(make_config(controller={"heartbeat_timeout": 1000.0}, weight_sync={"keep": 1}))
    trainer, rollout = stage.trainer(served), stage.rollout(served)
    trainer.register()
    publish(trainer, 0)
    publish(trainer, 0, begins=1)
    rollout.register()
    if restart:
        served.restart()
    assert publish_until_gone(trainer, 4) == {3, 4, 5}, "2 was handed out, and 1 is part of its chain"
    newest = ask(rollout)
    assert newest is not None
    assert newest.id == 6
    assert publish_until_gone(trainer, 2) == {1, 2, 7}
    rollout.beat(fetching=6)
    assert ask(rollout, 8) is None
    assert publish_until_gone(trainer, 2) == {8, 9}, "it says that it still reads 6"
    rollout.beat()
    assert 6 in publish_until_gone(trainer, 1)


def test_only_every_kth_version_is_published(stage: Stage) -> None:
    trainer, rollout = stage.ready(stage.serve(make_config(train={"sync_weight_interval": 2})))
    replies = [train_step(trainer, rollout, step) for step in range(6)]
    assert [reply.publish for reply in replies] == [False, True] * 3
