"""`logging.samples_dir`: all answers of steps and validations, each once, whatever ends the controller meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from controller.client import calls as api
from controller.services.answers import AnswerService
from controller.services.samples import Push
from controller.state.validation.rounds import Validation
from schema.wire.messages import PushItem
from tests.controller.conftest import Stage
from tests.controller.drivers import make_frame, make_header
from tests.controller.services.test_sample_texts import push_text
from tests.support.controller import make_config
from tests.support.served import ServedController
from tests.support.waiting import until


def answers(served: ServedController, kind: str, step: int) -> list[dict[str, Any]]:
    directory = Path(served.job.config.logging.samples_dir) / served.job.job_id
    path = directory / kind / f"step-{step:08d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(lines: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(line["group"], line["index"]) for line in lines]


def test_each_answer_of_a_step_is_written_once_and_again_when_the_step_is(stage: Stage, tmp_path: Path) -> None:
    logging = {"samples_dir": str(tmp_path / "answers"), "sample_groups": 0}
    config = make_config(train={"ckpt": {"enable_checkpoint": True}}, logging=logging)
    served, trainer, rollout = stage.at_work(config)
    for step in range(3):
        push_text(rollout, 2, source="sums")
        served.restart()
        assert trainer.batch(step) is not None
        trainer.commit(step)
        trainer.commit(step)  # again: the answer was lost
        trainer.publish(step + 1)
        rollout.update()
    written = {step: names(answers(served, "train", step)) for step in range(3)}
    assert written[0] == [("e0-p0", 0), ("e0-p0", 1), ("e0-p1", 0), ("e0-p1", 1)]
    every = [name for step in written.values() for name in step]
    assert len(every) == len(set(every)) == 12
    line = answers(served, "train", 1)[1]
    assert (line["step"], line["score"], line["rewards"], line["source"]) == (1, 1.0, {"right": 1.0}, "sums")
    assert (line["prompt"], line["reference"], line["finish_reason"]) == ("what?", "42", "stop")
    assert not {"pieces", "logprobs", "at"} & line.keys()
    assert not list((served.job.run_dir / "samples").glob("step-*")), "sample_groups = 0 keeps none for the viewer"
    trainer.checkpoint(1)
    trainer.register(1)  # a rewind: steps 1 and 2 are undone
    trainer.publish(1)
    rollout.update()
    push_text(rollout, 2)
    assert trainer.batch(1) is not None
    trainer.commit(1)
    assert {line["timeline"] for line in answers(served, "train", 1)} == {1}
    assert answers(served, "train", 2) == [], "its step was undone"
    assert names(answers(served, "train", 0)) == written[0]


def test_answers_of_a_validation_outlive_a_controller_that_ends_in_it(stage: Stage, tmp_path: Path) -> None:
    validation = {"enable": True, "freq": 1, "n_generation": 2}
    config = make_config(validation=validation, logging={"samples_dir": str(tmp_path)})
    served, _, rollout = stage.at_work(config)
    (group,) = rollout.lease(1).groups
    lines = "\x85 \u2028 \u2029"
    for score in (0.0, 1.0):  # of an attempt that ends: what it said is replaced
        header = make_header(0, 0, score=score)
        rollout.push(group, header, make_frame(header, f"{score}{lines}"))
    served.restart()
    rollout.client.send(api.release(group.lease_id))
    push_text(rollout, 3)
    until(lambda: len(answers(served, "validation", 0)) == 6, "the validation is filed")
    said = answers(served, "validation", 0)
    assert names(said) == [(f"v1-p{row}", index) for row in range(3) for index in range(2)]
    assert {line["step"] for line in said} == {0}
    assert said[0]["answer"] == f"0.0{lines}", "the first answer counts, as it does in the scores"
    until(lambda: not served.job.validation.unfiled, "its texts are forgotten")
    keys = [(f"v1-p{row}", f"text.{index}") for row in range(3) for index in range(2)]
    assert served.run(served.job.store.get_payloads(keys)) == [None] * 6


def test_answers_that_are_on_their_way_to_the_store_are_waited_for(stage: Stage, tmp_path: Path) -> None:
    validation = {"enable": True, "freq": 1, "n_generation": 2}
    config = make_config(validation=validation, logging={"samples_dir": str(tmp_path)})
    served, _, rollout = stage.at_work(config)
    push_text(rollout, 2)
    (last,) = rollout.lease(1).groups
    served.run(served.controller.events.stop())  # so that the answers are filed here
    frames = [make_frame(make_header(index, 0), "text") for index in range(2)]
    body, pushes = b"".join(frames), []
    for index, frame in enumerate(frames):
        item = PushItem(group_id=last.group_id, lease_id=last.lease_id, index=index)
        pushes.append(Push(item, memoryview(frame), sum(map(len, frames[:index]))))

    async def file_at_once() -> None:
        samples = served.controller.samples
        pushing = asyncio.create_task(samples.push(rollout.reply.replica_id, body, pushes))
        while not served.job.validation.unfiled:  # noqa: ASYNC110 - the very moment in which it is there
            await asyncio.sleep(0)
        await AnswerService(served.job, samples).file_validations()
        await pushing

    served.run(file_at_once())
    assert len(answers(served, "validation", 0)) == 6


def test_a_directory_that_cannot_be_written_costs_nothing_but_the_answers(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    served, trainer, rollout = stage.at_work(make_config(logging={"samples_dir": str(tmp_path / "file")}))
    push_text(rollout, 2)
    assert trainer.batch(0) is not None
    assert trainer.commit(0).committed_steps == 1
    assert served.job.progress.committed == 1


def test_rounds_that_are_to_be_filed_are_stored_and_those_that_a_rewind_undoes_forgotten() -> None:
    from controller.state.validation.group import EndedRound, ValidationParams

    params = ValidationParams(n_rows=2, n_samples=1, keeps_texts=True)
    validation = Validation(params)
    validation.unfiled = [EndedRound(1, 0), EndedRound(2, 5)]
    again = Validation.restore(params, {"header": validation.row("header")})
    assert again.unfiled == validation.unfiled
    again.rewind(4)
    assert again.unfiled == [EndedRound(1, 0)]
    assert again.take_dropped_texts() == [("v2-p0", 0), ("v2-p1", 0)]
