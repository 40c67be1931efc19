"""The whole cycle over HTTP against a real controller and a real Valkey."""

from __future__ import annotations

import pytest

from controller.client import Refused
from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import ErrorCode, LeaseStatus, Phase
from schema.wire.sample import decode_sample
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import make_header, train_step
from tests.support.controller import make_config


def test_a_job_from_the_first_registration_to_the_end(stage: Stage) -> None:
    served = stage.serve()
    user = stage.client(served)
    assert user.send(api.job()).phase is Phase.STARTING
    trainer, rollout = stage.ready(served)
    assert rollout.version == 0
    assert user.send(api.job()).phase is Phase.TRAINING
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
    for resume_step in (None, 6, 3):  # it died on its way out, and was started again
        assert refused(trainer.register, resume_step=resume_step).code is ErrorCode.JOB_FINISHED
    assert (user.send(api.job()).phase, user.send(api.ledger())) == (Phase.FINISHED, ledger)
    assert status.samples_per_s > 0
    ledger = user.send(api.ledger())
    assert ledger.created == sum(ledger.states.values()) == 12
    assert ledger.states["trained"] == 12
    assert ledger.max_staleness <= 1
    assert ledger.over_bound == 0
    assert [record.step for record in user.send(api.steps())] == list(range(6))
    assert [record.step for record in user.send(api.steps(since=4))] == [4, 5]


def test_payloads_go_when_nobody_can_need_them_any_more(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    pattern = f"cosmos:{served.job.job_id}:payload:*"
    with stage.valkey.client() as redis:
        rollout.finish(rollout.lease(2).groups)
        assert len(redis.keys(pattern)) == 2
        assert trainer.batch(0) is not None
        trainer.commit(0)
        assert redis.keys(pattern) == []


def test_commits_checkpoints_and_what_users_ask_for_wait_for_the_append_only_file(stage: Stage) -> None:
    """What the store loses is told again by those who did it; nobody would tell of a user's pause."""
    served, trainer, rollout = stage.at_work()
    user = stage.client(served)
    with stage.valkey.client() as redis:

        def waits() -> int:
            return int(redis.info("commandstats").get("cmdstat_waitaof", {"calls": 0})["calls"])

        before = waits()
        train_step(trainer, rollout, 0)
        assert waits() == before + 1
        trainer.commit(0)
        assert waits() == before + 2
        trainer.checkpoint(1)
        assert waits() == before + 3
        calls = [api.operate("pause"), api.operate("resume"), api.drain(rollout.reply.replica_id)]
        for number, call in enumerate([*calls, api.operate("stop"), api.fail("by hand")], start=4):
            user.send(call)
            assert waits() == before + number, call.path


def test_the_batch_holds_the_pushed_frames_in_table_order(stage: Stage) -> None:
    trainer, rollout = stage.ready(stage.serve())
    rollout.finish(rollout.lease(2).groups)
    batch = trainer.batch(0)
    assert batch is not None
    table, frames = batch
    samples = [decode_sample(frame) for frame in frames]
    assert [sample.header.index for sample in samples] == table.index == [0, 1, 0, 1]
    assert table.score == [0.0, 1.0, 0.0, 1.0]
    assert table.rewards == {"right": [0.0, 1.0, 0.0, 1.0]}
    epoch = trainer.reply.policy_epoch
    some = trainer.client.send(api.step_batch(0, epoch, samples=[2]))
    none = trainer.client.send(api.step_batch(0, epoch, samples="none"))
    assert some is not None
    assert none is not None
    assert len(none) < len(some)


def test_leased_groups_carry_prompt_row_and_seeds(stage: Stage) -> None:
    _, _, rollout = stage.at_work(
        make_config(train={"train_policy": {"type": "grpo", "dataloader_shuffle": False}})
    )
    (group,) = rollout.lease().groups
    assert group.prompt_token_ids == [1, 2, 3]
    assert group.row == {"prompt": "train 0", "answer": "0"}
    assert len(set(group.seeds)) == 2
    assert (group.kind, group.attempt, group.deadline) == ("train", 1, 1)


def test_only_every_kth_version_is_published(stage: Stage) -> None:
    trainer, rollout = stage.ready(stage.serve(make_config(train={"sync_weight_interval": 2})))
    replies = [train_step(trainer, rollout, step) for step in range(6)]
    assert [reply.publish for reply in replies] == [False, True] * 3


def test_the_last_step_may_be_short_and_samples_are_counted(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(rows=3)
    assert not train_step(trainer, rollout, 0).finished
    assert train_step(trainer, rollout, 1).finished
    assert stage.client(served).send(api.ledger()).states["trained"] == 3


def test_reaching_the_last_step_drops_what_is_left_as_surplus(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(
        make_config(train={"max_num_steps": 1}, controller={"oversample": 2.0})
    )
    rollout.finish(rollout.lease(3).groups)
    assert trainer.batch(0) is not None
    assert trainer.commit(0).finished
    ledger = stage.client(served).send(api.ledger())
    assert ledger.states["trained"] == 2
    assert ledger.dropped == {"surplus": ledger.created - 2}
    assert sum(ledger.states.values()) == ledger.created


def test_stragglers_are_dropped_when_the_config_says_so(stage: Stage) -> None:
    """Step 1 could be filled by later groups, but two due ones are missing: it waits, then goes on without."""
    timeouts = {"straggler_timeout": 1000.0, "heartbeat_timeout": 9000.0, "lease_timeout": 9000.0}
    served, trainer, rollout = stage.at_work(make_config(controller={"on_stale": "drop", **timeouts}))
    first = rollout.lease(4).groups
    rollout.finish(first[:2])
    assert trainer.batch(0) is not None
    trainer.commit(0)
    trainer.publish(1)
    rollout.update()
    rollout.finish(rollout.lease(2).groups)
    assert trainer.batch(1) is None
    served.skip(600.0)
    assert trainer.batch(1) is None
    served.skip(600.0)
    assert trainer.batch(1) is not None
    assert stage.client(served).send(api.ledger()).dropped == {"stale": 2}
    assert rollout.push(first[2], make_header(0, 0)).code == "lease_lost"


def test_when_the_last_groups_are_dropped_an_empty_batch_ends_the_training(stage: Stage) -> None:
    config = make_config(train={"train_policy": {"type": "grpo", "filter_reward_metric": "right"}})
    served, trainer, rollout = stage.at_work(config, rows=3)
    train_step(trainer, rollout, 0, size=1)
    rollout.finish(rollout.lease(1).groups, rewards={"right": 1.0}, score=1.0)
    batch = trainer.batch(1)
    assert batch is not None
    assert batch[0].n_samples == 0
    trainer.leave("finished")
    status = stage.client(served).send(api.job())
    assert (status.phase, status.step) == (Phase.FINISHED, 1)
    assert stage.client(served).send(api.ledger()).dropped == {"zero_variance": 1}


def test_a_supervised_job_has_steps_and_no_groups(stage: Stage) -> None:
    sft = {"train_policy": {"type": "sft"}, "train_batch_per_replica": 5, "epoch": 2}
    served = stage.serve(Config.model_validate({"train": sft}))
    trainer, user = stage.trainer(served), stage.client(served)
    reply = trainer.register()
    assert (reply.mode, reply.total_steps) == ("sft", 5)
    assert user.send(api.job()).phase is Phase.TRAINING
    with pytest.raises(Refused, match="cannot be paused"):
        user.send(api.operate("pause"))
    for step, samples in enumerate((5.0, 1.7e308, 1.7e308, -1.7e308, 5.0)):
        last = trainer.commit(step, loss=1.0, samples=samples, tokens=10 * 5.0)
        assert user.send(api.job()).step == step + 1, "whatever a trainer claims to have counted"
    assert last.finished
    assert trainer.commit(4).committed_steps == 5
    trainer.leave("finished")
    assert user.send(api.job()).phase is Phase.FINISHED
    assert user.send(api.ledger()).created == 0
