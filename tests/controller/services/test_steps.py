"""What a trainer fetches: a table and the payloads of its rows, also while the step changes under the call."""

from __future__ import annotations

import asyncio
import json

import pytest

from controller.api.routes.samples import _unpack as unpack
from controller.client import calls as api
from controller.errors import ApiError
from schema.wire.batch import decode_batch
from schema.wire.messages import ErrorCode, RegisterRequest
from schema.wire.sample import decode_sample
from tests.controller.conftest import Stage, refused
from tests.controller.drivers import request_id
from tests.controller.store.test_payload_files import SharingRollout
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


@pytest.mark.parametrize("rows", [[4], [-1], [0, 1, 0]])
def test_rows_that_are_none_or_asked_for_twice_are_refused(stage: Stage, rows: list[int]) -> None:
    _, trainer, rollout = stage.at_work()
    rollout.finish(rollout.lease(2).groups)
    asked = api.step_batch(0, trainer.reply.policy_epoch, rows)
    assert refused(trainer.client.send, asked).code is ErrorCode.BAD_REQUEST


def test_a_push_that_looks_for_its_files_while_its_replica_registers_anew_is_refused(
    stage: Stage, tmp_path: object
) -> None:
    served, _, plain = stage.at_work(make_config(controller={"payload_store": f"{tmp_path}/shared"}))
    files = served.job.payload_files
    assert files is not None
    rollout = SharingRollout.of(plain, files.root)
    items, frames = rollout.bundle(rollout.lease(1).groups)
    body = api.push_many(items, frames).body
    assert body is not None
    old = rollout.reply.replica_id

    async def race() -> None:
        job = served.job
        replica_id, pushes = unpack(body)
        job.registry.gone(job.registry.find(old), "not heard of")
        pushing = asyncio.create_task(served.controller.samples.push(replica_id, body, pushes))
        await asyncio.sleep(0)  # a thread looks for the files
        request = RegisterRequest(request_id=request_id(), role="rollout", name=rollout.name)
        await served.controller.replicas.register(request)
        with pytest.raises(ApiError) as refused:
            await pushing
        assert refused.value.code is ErrorCode.STALE_INCARNATION
        await job.save()

    served.run(race())
    row = stage.valkey.client().hget(f"cosmos:{served.job.job_id}:replicas", rollout.name)
    assert json.loads(row)["incarnation"] == 2  # type: ignore[arg-type]
