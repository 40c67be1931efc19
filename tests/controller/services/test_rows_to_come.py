"""A job that has begun before all of its rows are prepared: groups of the first ones, then of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controller.client import calls as api
from schema.wire.messages import JobStatus, LeaseStatus
from schema.wire.prompts import PromptFile, PromptWriter
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import begin, train_step
from tests.support.controller import make_config
from tests.support.served import served_controller


def write_rows(run_dir: Path, n: int, early: int, *, unfinished: bool = False) -> None:
    with PromptWriter(run_dir / "data" / "train.safetensors") as writer:
        for row in range(early):
            writer.add(np.array([1, 2, 3 + row], np.int32), b'{"prompt": "train %d", "answer": "%d"}' % (row, row))
        notes = writer.early({"train": early})
        for row in range(early, early if unfinished else n):
            writer.add(np.array([1, 2, 3 + row], np.int32), b'{"prompt": "train %d", "answer": "%d"}' % (row, row))
        writer.finish(notes | ({"unfinished": "true"} if unfinished else {}))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_goes_on_with_all_rows_once_they_are_prepared(stage: Stage, restarts: bool) -> None:
    train = {"max_num_steps": 6, "epoch": 2, "train_policy": {"allowed_outdated_steps": 0}}
    config = make_config(train=train, controller=PATIENT)
    run_dir = stage.run_dir(config)
    write_rows(run_dir, 10, 4, unfinished=True)
    served = stage.stack.enter_context(served_controller(run_dir, stage.valkey.url))
    user = stage.client(served)
    trainer, rollout = begin(stage.client(served, "policy"), stage.client(served, "rollout"))
    registered = rollout.reply.rows_files["train"].digest
    seen: list[int] = []

    def step(number: int) -> JobStatus:
        groups = rollout.lease(2).groups
        seen.extend(group.prompt_token_ids[2] - 3 for group in groups)
        rollout.finish(groups)
        train_step(trainer, rollout, number)
        return user.send(api.job())

    assert [step(number).total_steps for number in (0, 1)] == [6, 6]
    assert sorted(seen) == [0, 1, 2, 3]
    reply = rollout.lease(2)
    assert (reply.status, "the preparation goes on" in reply.reason) == (LeaseStatus.THROTTLED, True)
    waiting = user.send(api.job())
    assert (waiting.phase, served.job.progress.passes_done) == ("training", 0)
    assert waiting.sentence.startswith("step 2 waits for rows that are being prepared (logs/data.log)")
    write_rows(run_dir, 10, 4)
    if restarts:
        served.restart()
    served.skip(0.0)
    whole = PromptFile(run_dir / "data" / "train.safetensors")
    reading = rollout.lease_request(1).model_copy(update={"reads": [registered]})
    named = [rollout.client.send(api.lease(reading)), rollout.lease(1)]
    assert [set(reply.rows_files) for reply in named] == [{"train"}, set()], "said once"
    assert named[0].rows_files["train"].digest == whole.digest != registered
    seen += [group.prompt_token_ids[2] - 3 for reply in named for group in reply.groups]
    rollout.finish([group for reply in named for group in reply.groups])
    train_step(trainer, rollout, 2)
    assert [step(number).total_steps for number in (3, 4, 5)] == [6, 6, 6]
    assert sorted(seen[:10]) == list(range(10)), "each row once in the first pass"
    assert len(set(seen[10:])) == 2
    texts = [event.text for event in served.job.events.after(0)]
    assert ("all 10 rows are prepared, of which the job began with 4" in texts) != restarts
