"""What becomes of the payloads of samples, and of a push under which its replica changes."""

from __future__ import annotations

import asyncio
import json

import pytest

from controller.api.routes.samples import _unpack as unpack
from controller.client import calls as api
from controller.errors import ApiError
from schema.wire.messages import ErrorCode, RegisterRequest
from tests.controller.conftest import Stage
from tests.controller.drivers import request_id
from tests.controller.store.test_payload_files import SharingRollout
from tests.support.controller import make_config


def test_payloads_go_when_nobody_can_need_them_any_more(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    pattern = f"cosmos:{served.job.job_id}:payload:*"
    with stage.valkey.client() as redis:
        rollout.finish(rollout.lease(2).groups)
        assert len(redis.keys(pattern)) == 2
        assert trainer.batch(0) is not None
        trainer.commit(0)
        assert redis.keys(pattern) == []


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
