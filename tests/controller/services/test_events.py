"""The stream of events: what is in it, how it is followed, and that neither a restart nor a full disk breaks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from controller.client import calls as api
from controller.services import events as service
from controller.state.event_log import KEPT, EventLog
from schema.wire import event_file
from schema.wire.messages import ErrorCode, Event, EventKind
from tests.controller.conftest import Stage, asking
from tests.controller.drivers import make_header, train_step
from tests.support.controller import make_config
from tests.support.served import ServedController
from tests.support.waiting import until


def events_of(text: str) -> list[Event]:
    return [
        Event.model_validate_json(line.removeprefix("data: "))
        for line in text.split("\n")
        if line.startswith("data: ")
    ]


def past(served: ServedController, **query: Any) -> list[Event]:
    with asking(served.url) as http:
        answer = http.get("/v1/events", params={"follow": False, **query})
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.text)


def filed(served: ServedController) -> list[Event]:
    return list(event_file.read(served.job.event_file))


def test_a_run_tells_what_happens_and_its_file_says_the_same(stage: Stage) -> None:
    config = make_config(train={"ckpt": {"enable_checkpoint": True}}, reward={"on_error": "drop"})
    served, trainer, rollout = stage.at_work(config)
    train_step(trainer, rollout, 0)
    trainer.checkpoint(1)
    rollout.update()
    rollout.finish(rollout.lease(1).groups, score=None, error="ValueError: no\nin reward function f\n  File …")
    until(lambda: len(filed(served)) == served.job.events.highest, "all events are filed")
    found = past(served)
    kinds = [event.kind for event in found]
    assert kinds[0] is EventKind.CONTROLLER
    assert {"replica", "publication", "job", "step", "checkpoint", "drop"} <= set(map(str, kinds))
    (drop,) = (event for event in found if event.kind is EventKind.DROP)
    assert drop.data["reason"] == "reward_error"
    assert drop.data["count"] == 1
    assert drop.text.endswith("ValueError: no")
    assert [event.id for event in found] == list(range(1, len(found) + 1))
    (step,) = (event for event in found if event.kind is EventKind.STEP)
    assert step.data["step"] == 0
    assert step.data["samples"] > 0
    assert step.data["timeline"] == 0
    assert filed(served) == found
    assert [event.kind for event in past(served, kind=["step", "checkpoint"])] == ["step", "checkpoint"]
    assert past(served, after=found[-2].id) == found[-1:]


def test_a_stream_is_followed_and_gone_on_with_after_a_restart(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    with asking(served.url) as http, http.stream("GET", "/v1/events", params={"kind": "step"}) as answer:
        lines = answer.iter_lines()
        train_step(trainer, rollout, 0)
        first = next_event(lines)
        assert first.data["step"] == 0
    served.restart()
    trainer.register(1)
    train_step(trainer, rollout, 1)
    with asking(served.url) as http:
        headers = {"last-event-id": str(first.id)}
        with http.stream("GET", "/v1/events", headers=headers, params={"kind": "step"}) as answer:
            assert next_event(answer.iter_lines()).data["step"] == 1
    ids = [event.id for event in filed(served)]
    assert ids == sorted(set(ids))
    assert sum(event.kind is EventKind.CONTROLLER for event in filed(served)) == 2


def next_event(lines: Iterator[str]) -> Event:
    return Event.model_validate_json(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))


def test_a_rewind_is_an_event_and_undoes_steps(stage: Stage) -> None:
    config = make_config(train={"ckpt": {"enable_checkpoint": True}})
    served, trainer, rollout = stage.at_work(config)
    train_step(trainer, rollout, 0)
    trainer.checkpoint(1)
    train_step(trainer, rollout, 1)
    trainer.register(1)
    until(lambda: any(event.kind is EventKind.REWIND for event in filed(served)), "a rewind is filed")
    course = event_file.course(filed(served))
    assert [record.step for record in course.steps] == [0] == [r.step for r in served.job.steps.since(0)]


def test_an_event_file_that_cannot_be_written_stops_nothing_and_is_completed(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    path = served.job.event_file
    until(lambda: len(filed(served)) == served.job.events.highest, "all events are filed")
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    train_step(trainer, rollout, 0)
    assert EventKind.STEP in [event.kind for event in past(served, after=len(filed_bytes(kept)))]
    path.rmdir()
    path.write_bytes(kept)
    trainer.register(0)
    until(lambda: len(filed(served)) == served.job.events.highest, "all events are filed")
    assert EventKind.STEP in [event.kind for event in filed(served)]


def test_cut_answers_that_leave_their_groups_mean_are_warned_of_once(stage: Stage) -> None:
    """Half of the answers are overlong: their scores count nowhere."""
    served, trainer, rollout = stage.at_work()

    def step(number: int) -> None:
        for group in rollout.lease(2).groups:
            for index, (reason, score) in enumerate((("stop", 0.25), ("overlong", 1.0))):
                header = make_header(index, rollout.version, finish_reason=reason, score=score)
                assert rollout.push(group, header).accepted
        assert trainer.batch(number) is not None
        trainer.commit(number, truncated_unscored_fraction=0.5)
        trainer.publish(number + 1)
        rollout.update()

    step(0)
    served.restart()
    step(1)
    step(2)
    events = [event for event in served.job.events.after(0) if event.kind in (EventKind.STEP, EventKind.ALARM)]
    assert [event.text for event in events if event.kind is EventKind.STEP] == [
        f"step {number} is trained, reward 0.250" for number in range(3)
    ]
    (alarm,) = (event for event in events if event.kind is EventKind.ALARM)
    assert (alarm.data["name"], alarm.data["on"], alarm.data["step"]) == ("cut_unpunished", True, 1)
    assert alarm.text.startswith("50.0% of the answers of step 0 were cut")
    assert [one.name for one in stage.client(served).send(api.job()).alarms] == ["cut_unpunished"]


def filed_bytes(data: bytes) -> list[Event]:
    return [event for line in data.split(b"\n") if (event := event_file.parse(line)) is not None]


def test_what_memory_has_forgotten_comes_from_the_file(stage: Stage) -> None:
    served = stage.serve()

    def many() -> None:
        for number in range(KEPT + 2 * service.CHUNK):
            served.job.events.add(EventKind.ALARM, f"alarm {number}")
            if number % KEPT == KEPT - 1:
                served.job.stage()

    before = served.job.events.highest
    served.call(many)
    served.run(served.job.save())
    until(lambda: served.job.events.filed == served.job.events.highest, "the events are filed, and it is known")
    assert len(filed(served)) > KEPT + 2 * service.CHUNK
    served.call(lambda: served.job.events.add(EventKind.ALARM, "one more"))
    assert served.job.events.oldest > before + 1
    served.run(served.job.save())
    until(lambda: filed(served)[-1].text == "one more", "it is filed")
    found = past(served, after=before)
    assert [event.id for event in found] == [event.id for event in filed(served) if event.id > before]


def test_bad_requests_and_too_many_viewers_are_refused(stage: Stage) -> None:
    served = stage.serve()
    with asking(served.url) as http:
        for headers, query in (
            ({"last-event-id": "x"}, {}),
            ({"last-event-id": "9" * 5000}, {}),
            ({}, {"kind": "nothing"}),
            ({}, {"after": -1}),
        ):
            answer = http.get("/v1/events", headers=headers, params={"follow": False, **query})
            assert answer.status_code == 422, answer.text
        served.controller.events._streams = service.MOST_STREAMS
        assert http.get("/v1/events").json()["code"] == ErrorCode.BUSY
        served.controller.events._streams = 0


def test_what_the_file_does_not_have_is_kept_for_it() -> None:
    log = EventLog(lambda: 2.0)
    for number in range(2 * KEPT):
        log.add(EventKind.ALARM, str(number))
    assert len(log.after(0)) == 2 * KEPT
    log.filed = 2 * KEPT
    log.add(EventKind.ALARM, "one more")
    assert len(log.after(0)) == KEPT


def test_who_has_seen_what_never_was_begins_anew(stage: Stage) -> None:
    served = stage.serve()
    assert past(served, after=10**9) == past(served)


def test_ids_go_on_from_the_highest_that_is_known() -> None:
    row = Event(id=5, at=1.0, kind=EventKind.ALARM, text="a").model_dump()
    for file_id, following in ((0, 6), (9, 10)):
        log = EventLog(lambda: 2.0, [row], file_id)
        log.add(EventKind.ALARM, "two\nlines " + "x" * 2000)
        (newest,) = log.after(max(5, file_id))
        assert newest.id == following
        assert len(newest.text) <= 1024
        assert "\n" not in newest.text
        assert json.loads(newest.model_dump_json())["kind"] == "alarm"


def test_a_lost_connection_frees_its_place(stage: Stage) -> None:
    served = stage.serve()
    with asking(served.url) as http, http.stream("GET", "/v1/events") as answer:
        assert isinstance(answer, httpx.Response)
        until(lambda: served.controller.events._streams == 1, "the stream is open")
    served.call(lambda: served.job.events.add(EventKind.ALARM, "somebody looks"))
    served.run(served.job.save())
    until(lambda: served.controller.events._streams == 0, "its end is noticed")
