"""What a trainer fetches, a table and the payloads of its rows, also while the step changes under the call; which
groups make a step; what a commit waits for.
"""

from __future__ import annotations

import asyncio

import pytest

from controller.client import Refused
from controller.client import calls as api
from controller.ledger.group import GroupState
from schema.wire.batch import decode_batch
from schema.wire.messages import ErrorCode, Phase
from schema.wire.sample import decode_sample
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import make_header, train_step
from tests.support.controller import make_config


def test_each_table_has_its_own_payloads_whatever_is_assembled_meanwhile(stage: Stage) -> None:
    served = stage.serve(make_config(train={"ckpt": {"enable_checkpoint": True}}))  # payloads outlive commits
    trainer, rollout = stage.ready(served)
    for tokens in (6, 7, 8, 9):
        rollout.finish(rollout.lease(1).groups, tokens=tokens)
    training, ledger = served.controller.steps, served.job.require_ledger()
    epoch = trainer.reply.policy_epoch

    async def both() -> tuple[bytes | None, bytes | None]:
        first = asyncio.create_task(training.batch(0, epoch, None, 0.0))
        await asyncio.sleep(0)  # it is assembled, and waits for the store
        ledger.commit(0)
        second = asyncio.create_task(training.batch(1, epoch, None, 0.0))
        return await first, await second

    for data in served.run(both()):
        assert data is not None
        table, frames = decode_batch(data)
        assert [decode_sample(frame).header.total_tokens for frame in frames] == table.total_tokens


def test_groups_whose_payloads_the_store_has_lost_are_made_again_once(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    rollout.finish(rollout.lease(2).groups)
    assert trainer.batch(0) is not None
    redis = stage.valkey.client()
    assert redis.delete(*redis.keys(f"*{served.job.job_id}:payload:e0-p1:*"))  # type: ignore[misc]
    training, epoch = served.controller.steps, trainer.reply.policy_epoch

    async def ranks() -> list[bytes | None]:
        return await asyncio.gather(*(training.batch(0, epoch, rows, 0.0) for rows in ([0], [2], [3], None)))

    answers = served.run(ranks())
    assert [answer is not None for answer in answers] == [True, False, False, False]
    assert served.job.require_ledger().table.groups["e0-p0"].attempt == 1
    (again,) = rollout.lease(1).groups
    assert (again.group_id, again.attempt) == ("e0-p1", 2)
    rollout.finish([again])
    assert trainer.batch(0) is not None


def test_the_next_batch_is_guessed_while_a_step_trains(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    service, epoch = served.controller.steps, trainer.reply.policy_epoch

    def ahead(step: int, rows: list[int] | None = None) -> bytes | None:
        return trainer.client.send(api.step_batch(step, epoch, rows or "all", prefetch=True))

    first, second = rollout.lease(2).groups, rollout.lease(2).groups
    assert len(second) == 2
    rollout.finish(first)
    assert ahead(1) is None, "no step trains yet"
    assert trainer.batch(0) is not None

    async def meanwhile() -> bytes | None:
        waits = asyncio.create_task(service.prefetch(1, epoch, None, 30.0))
        await asyncio.to_thread(rollout.finish, second)
        return await waits

    guess = served.run(meanwhile())
    assert guess is not None
    assert decode_batch(ahead(1, [1]) or b"")[1] == [decode_batch(guess)[1][1]]
    states = served.job.require_ledger().table.by_state
    assert (len(states[GroupState.BATCHED]), len(states[GroupState.READY])) == (2, 2)

    async def until_the_commit() -> bytes | None:
        waits = asyncio.create_task(service.prefetch(2, epoch, None, 30.0))
        await asyncio.to_thread(trainer.commit, 0)
        await asyncio.to_thread(trainer.batch, 1)
        await asyncio.to_thread(trainer.commit, 1)
        await asyncio.to_thread(trainer.batch, 2, 0.0)
        return await waits

    assert ahead(1) is not None
    assert served.run(until_the_commit()) is None
    assert refused(trainer.client.send, api.step_batch(3, epoch + 1, prefetch=True)).code is ErrorCode.STALE_EPOCH
    table, frames = decode_batch(guess)
    assert table.step == 1
    assert [decode_sample(frame).header.total_tokens for frame in frames] == table.total_tokens


def test_rows_that_are_none_or_asked_for_twice_are_refused(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    rollout.finish(rollout.lease(2).groups)
    for rows in ([4], [-1], [0, 1, 0]):
        asked = api.step_batch(0, trainer.reply.policy_epoch, rows)
        assert refused(trainer.client.send, asked).code is ErrorCode.BAD_REQUEST, rows


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


def test_reaching_the_last_step_drops_what_is_left_as_surplus(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(train={"max_num_steps": 1}, controller={"oversample": 2.0}))
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


def test_a_step_that_the_filter_leaves_empty_fails_the_job_also_across_a_restart(stage: Stage) -> None:
    policy = {"type": "grpo", "filter_reward_metric": "right", "max_retry_for_on_policy": 1}
    served, trainer, rollout = stage.at_work(make_config(train={"train_policy": policy}))
    equal = {"rewards": {"right": 1.0}, "score": 1.0}
    for _ in range(2):
        rollout.finish(rollout.lease(1).groups, **equal)
    served.restart()
    assert stage.client(served).send(api.job()).phase is Phase.TRAINING
    rollout.finish(rollout.lease(1).groups, **equal)
    status = stage.client(served).send(api.job())
    assert status.phase is Phase.FAILED
    for part in (
        "step 0 is not full: 3 groups were dropped as zero_variance",
        "train.train_policy.max_retry_for_on_policy = 1 allows",
        "a larger rollout.n_generation, or train.train_policy.max_retry_for_on_policy = 0",
    ):
        assert part in (status.last_error or "")
    with pytest.raises(Refused, match="max_retry_for_on_policy"):
        trainer.batch(0)
    assert stage.client(served).send(api.operate("resume")).phase is Phase.TRAINING
    rollout.finish(rollout.lease(2).groups)
    assert trainer.batch(0) is not None, "a job that is resumed counts from there"
