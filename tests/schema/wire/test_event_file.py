"""Events on disk: what a reader makes of a file that was written by several processes, some of them killed."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from schema.wire import event_file
from schema.wire.event_file import Course
from schema.wire.messages import Event, EventKind


def step(id_: int, number: int, **metrics: float) -> Event:
    data = {"step": number, "at": 1.0 * id_, "metrics": metrics}
    return Event(id=id_, at=id_, kind=EventKind.STEP, text=f"step {number}", data=data)


def rewind(id_: int, number: int) -> Event:
    return Event(id=id_, at=id_, kind=EventKind.REWIND, text="back", data={"step": number, "timeline": 1})


def validation(id_: int, version: int) -> Event:
    data = {
        "version": version, "at": 1.0, "samples": 3, "score_mean": 0.5, "rewards_mean": {},
        "response_tokens_mean": 2.0,
    }  # fmt: skip
    return Event(id=id_, at=id_, kind=EventKind.VALIDATION, text="validation", data=data)


def test_half_a_line_and_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    path = event_file.path_of(tmp_path)
    assert list(event_file.read(path)) == []
    assert event_file.last_id(path) == 0
    event_file.append(path, [step(1, 0), step(2, 1)])
    with path.open("ab") as file:
        file.write(b'not JSON\n{"id":3,"at":')
    assert event_file.last_id(path) == 2
    event_file.append(path, [step(3, 2)])
    event_file.append(path, [step(3, 2), step(4, 3)])  # a writer that was cancelled had written the first
    assert [event.id for event in event_file.read(path)] == [1, 2, 3, 4]
    assert [event.id for event in event_file.read(path, after=2)] == [3, 4]
    assert event_file.last_id(path) == 4


def test_the_newest_id_is_found_before_a_line_that_is_longer_than_the_tail(tmp_path: Path) -> None:
    path = event_file.path_of(tmp_path)
    long = Event(id=7, at=1.0, kind=EventKind.DROP, text="long", data={"error": "x" * 2 * event_file.TAIL})
    event_file.append(path, [step(6, 0), long])
    assert event_file.last_id(path) == 7


def test_steps_that_were_undone_are_not_part_of_the_course() -> None:
    events = [step(1, 0), validation(2, 1), step(3, 1), validation(4, 2), step(5, 2), rewind(6, 1)]
    found = event_file.course(events)
    assert [record.step for record in found.steps] == [0]
    assert [record.version for record in found.validations] == [1]
    again = Course(found.steps, found.validations)
    assert again.add(step(7, 1, loss=2.0)) is None
    assert again.steps[-1].metrics == {"loss": 2.0}


@given(st.lists(st.tuples(st.sampled_from(["step", "rewind", "validation"]), st.integers(0, 9)), max_size=40))
def test_a_course_has_each_step_once_and_the_newest_of_each(what: list[tuple[str, int]]) -> None:
    makers = {"step": step, "rewind": rewind, "validation": validation}
    course, known = Course(), dict[int, int]()
    for id_, (kind, number) in enumerate(what, start=1):
        undone = course.add(makers[kind](id_, number))
        if kind != "validation":
            gone = [at for at in known if at >= number]
            assert (undone is not None) == bool(gone)
            known = {at: newest for at, newest in known.items() if at < number}
        if kind == "step":
            known[number] = id_
        assert [(record.step, record.at) for record in course.steps] == sorted(known.items())
        versions = [record.version for record in course.validations]
        assert versions == sorted(set(versions))
