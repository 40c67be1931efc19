"""A trainer that publishes nothing is told that a replica needs a full version; one that publishes learns it then."""

from __future__ import annotations

from controller.client import calls as api
from schema.wire import messages as m
from tests.controller.conftest import Stage
from tests.controller.drivers import Rollout
from tests.support.controller import make_config
from tests.support.waiting import until


def report(rollout: Rollout, publication: int) -> None:
    request = m.UpdateReport(
        replica_id=rollout.reply.replica_id,
        incarnation=rollout.reply.incarnation,
        status="unreadable",
        detail="torn",
    )
    rollout.client.send(api.report_update(publication, request))


def test_a_trainer_that_publishes_nothing_is_told_in_a_heartbeat(stage: Stage) -> None:
    served = stage.serve(make_config(controller={"heartbeat_interval": 0.1}))
    trainer, rollout = stage.ready(served)
    assert "anchor" not in trainer.beat().commands
    report(rollout, 1)
    until(lambda: "anchor" in trainer.beat().commands, "the wish for an anchor")
    assert "anchor" not in trainer.beat().commands  # not in every one
    until(lambda: "anchor" in trainer.beat().commands, "the wish once more")
    assert trainer.publish(0).publication.id == 2  # the same version, in full
    assert not trainer.publish(0).anchor


def test_a_trainer_that_goes_on_is_told_in_the_answer_to_its_publication(stage: Stage) -> None:
    served = stage.serve(make_config(controller={"heartbeat_interval": 1000.0, "heartbeat_timeout": 5000.0}))
    trainer, rollout = stage.ready(served)
    report(rollout, 1)
    assert "anchor" not in trainer.beat().commands
    request = trainer.publish_request(0).model_copy(update={"kind": "delta", "begins": 1})
    assert trainer.client.send(api.publish(request)).anchor
