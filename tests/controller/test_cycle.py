"""The whole cycle over HTTP against a real controller and a real Valkey."""

from __future__ import annotations

from controller import api
from schema.wire.messages import LeaseStatus, Phase
from schema.wire.sample import decode_sample
from tests.controller.drivers import Rollout, Trainer, train_step
from tests.support.controller import ControllerProcess


def test_a_job_from_the_first_registration_to_the_end(
    controller: ControllerProcess, trainer: Trainer, rollout: Rollout
) -> None:
    with controller.client() as user:
        assert user.send(api.job()).phase is Phase.STARTING
        trainer.register()
        trainer.publish(0)
        rollout.register()
        assert rollout.version == 0
        total = trainer.reply.total_steps
        assert total == 6
        replies = [train_step(trainer, rollout, step) for step in range(total)]
        assert [reply.committed_steps for reply in replies] == [1, 2, 3, 4, 5, 6]
        assert [reply.finished for reply in replies] == [False] * 5 + [True]
        assert user.send(api.job()).phase is Phase.FINISHING
        assert rollout.lease().status is LeaseStatus.THROTTLED
        trainer.leave("finished")
        assert rollout.lease().status is LeaseStatus.FINISHED
        status = user.send(api.job())
        assert (status.phase, status.step, status.version) == (Phase.FINISHED, 6, 6)
        ledger = user.send(api.ledger())
        assert ledger.created == sum(ledger.states.values()) == 12
        assert ledger.states["trained"] == 12
        assert ledger.max_staleness <= 1
        assert ledger.over_bound == 0
        steps = user.send(api.steps())
        assert [record.step for record in steps] == list(range(6))
        assert [record.step for record in user.send(api.steps(since=4))] == [4, 5]


def test_the_batch_holds_the_pushed_frames_in_table_order(trainer: Trainer, rollout: Rollout) -> None:
    trainer.register()
    trainer.publish(0)
    rollout.register()
    rollout.finish(rollout.lease(2).groups)
    batch = trainer.batch(0)
    assert batch is not None
    table, frames = batch
    samples = [decode_sample(frame) for frame in frames]
    assert [sample.header.index for sample in samples] == table.index == [0, 1, 0, 1]
    assert table.score == [0.0, 1.0, 0.0, 1.0]
    assert table.rewards == {"right": [0.0, 1.0, 0.0, 1.0]}
    some = trainer.client.send(api.step_batch(0, trainer.reply.policy_epoch, samples=[2]))
    none = trainer.client.send(api.step_batch(0, trainer.reply.policy_epoch, samples="none"))
    assert some is not None
    assert none is not None
    assert len(none) < len(some)
