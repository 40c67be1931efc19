"""Samples as text: whatever becomes of a sample that is kept, people find it, with what it was paid and why."""

from __future__ import annotations

from typing import Any

from schema.wire import event_file, sample_file
from schema.wire.messages import EventKind, SampleRecord, TrainedSample
from tests.controller.conftest import Stage, asking
from tests.controller.drivers import Rollout, make_frame, make_header
from tests.support.controller import make_config
from tests.support.served import ServedController
from tests.support.waiting import until

ANSWER = "<script>alert(1)</script>\x1b[31m\n\u202e"


def push_text(rollout: Rollout, count: int = 1, **changes: object) -> None:
    """Push all samples of the next groups with their text."""
    for group in rollout.lease(count).groups:
        version = rollout.version if group.pinned_version is None else group.pinned_version
        for index in range(len(group.seeds)):
            header = make_header(index, version, **changes)
            assert rollout.push(group, header, make_frame(header, ANSWER)).accepted


def found(served: ServedController, **query: Any) -> list[SampleRecord]:
    with asking(served.url) as http:
        answer = http.get("/v1/samples", params=query)
        assert answer.status_code == 200, answer.text
        return [SampleRecord.model_validate(row) for row in answer.json()]


def test_a_trained_sample_is_found_with_what_rollout_and_trainer_say_of_it(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    push_text(rollout, 2)
    served.restart()  # what was pushed is read back from its payloads
    assert trainer.batch(0) is not None
    said = [TrainedSample(group_id="e0-p1", index=1, advantage=0.5, logprobs=[-1.0, -2.0, -3.0])]
    trainer.commit(0, said)
    until(lambda: len(found(served, step=0)) == 4, "the samples are filed")
    records = found(served, step=0)
    assert [(record.group, record.index) for record in records] == [
        ("e0-p0", 0),
        ("e0-p0", 1),
        ("e0-p1", 0),
        ("e0-p1", 1),
    ]
    last = records[-1]
    assert (last.answer, last.prompt, last.reference) == (ANSWER, "what?", "42")
    assert (last.advantage, last.trainer_logprobs) == (0.5, [-1.0, -2.0, -3.0])
    assert (last.score, last.rewards, last.weights) == (1.0, {"right": 1.0}, {"right": 1.0})
    assert (last.ending, last.step, last.dropped) == ("finished", 0, "")
    assert [record.score for record in found(served, order="best", limit=2)] == [1.0, 1.0]
    assert [record.score for record in found(served, order="worst", limit=2)] == [0.0, 0.0]
    assert found(served, order="errors") == []


def test_a_failed_sample_is_found_at_once_and_its_failure_counted(stage: Stage) -> None:
    served, _, rollout = stage.at_work()
    error = "ValueError: flaky\nin reward function dir/rewards.py:flaky\nTraceback …"
    push_text(rollout, 1, score=None, error=error, ending="reward_error", outage=False)
    until(lambda: found(served, order="errors"), "failures are filed")
    assert [record.error for record in found(served, order="errors")] == [error, error]
    served.restart()
    push_text(rollout, 1, score=None, error=error, ending="reward_error", outage=True)
    stats = served.job.reward_stats
    assert (stats.scored, stats.timeouts, stats.failed.total()) == (0, 2, 4)
    assert served.controller.job_service.status().rewards.seconds_mean is None, "none of them was scored"
    push_text(rollout, 1, seconds=1.5)
    assert served.controller.job_service.status().rewards.seconds_mean == 1.5
    events = list(event_file.read(served.job.event_file))
    (first,) = (event for event in events if event.kind is EventKind.REWARD)
    assert first.data["error"] == error


def test_steps_that_a_rewind_undid_are_found_again_once_they_are_trained_again(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(train={"ckpt": {"enable_checkpoint": True}}))
    for step in range(2):
        push_text(rollout, 2)
        assert trainer.batch(step) is not None
        trainer.commit(step)
    trainer.checkpoint(1)
    until(lambda: found(served, step=1), "the samples are filed")
    trainer.register(1)
    until(lambda: {record.step for record in found(served)} == {0}, "what was undone is hidden")
    assert found(served, step=1) == []
    assert {record.step for record in found(served, order="worst")} == {0}
    assert trainer.batch(1) is not None
    trainer.commit(1)
    until(lambda: {record.step for record in found(served)} == {1}, "what was trained again is filed")
    assert {record.timeline for record in found(served)} == {1}


def test_a_group_that_is_dropped_is_found_with_the_reason(stage: Stage) -> None:
    config = make_config(train={"train_policy": {"filter_reward_metric": ["right"]}})
    served, _, rollout = stage.at_work(config)
    push_text(rollout, 1, rewards={"right": 1.0}, score=1.0)
    until(lambda: found(served), "dropped samples are filed")
    assert [(record.dropped, record.score) for record in found(served)] == [("zero_variance", 1.0)] * 2


def test_samples_of_a_validation_are_found_by_its_version(stage: Stage) -> None:
    config = make_config(validation={"enable": True, "freq": 1})
    served, _, rollout = stage.at_work(config)
    push_text(rollout, 3)
    until(lambda: len(found(served, kind="validation")) == 3, "samples of the validation are filed")
    assert {record.step for record in found(served, kind="validation", step=0)} == {0}


def test_a_text_that_is_none_and_a_folder_that_cannot_be_written_cost_nothing_but_the_text(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    sample_file.folder_of(served.job.run_dir).write_text("in the way")
    push_text(rollout, 1, score=None, error="KeyError: 'x'")
    (group,) = rollout.lease(1).groups
    for index in range(2):
        header = make_header(index, rollout.version)
        frame = make_frame(header, ANSWER).replace(b"weights", b"weightz")
        assert rollout.push(group, header, frame).accepted
    push_text(rollout, 1)
    assert trainer.batch(0) is not None
    trainer.commit(0)
    assert served.job.progress.committed == 1
