"""What a tracker is given is what the run's course is, whatever is undone, whatever fails, whoever starts again."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.trackers.follow import Sent, TrackerFollower, validation_metrics
from launcher.trackers.tables import AnswerTable
from schema.wire.event_file import course
from schema.wire.messages import Event, EventKind, SourceScores
from tests.launcher.samples import held_out_loss
from tests.schema.wire.test_event_file import rewind, step, validation


class Board:
    """A tracker that remembers, by segment, and fails now and then."""

    def __init__(self) -> None:
        self.segments: dict[int, list[tuple[str, int, float]]] = {}
        self.fails = False

    def open(self, sent: Sent) -> Page:
        return Page(self, self.segments.setdefault(sent.segment, []))


class Page:
    def __init__(self, board: Board, rows: list[tuple[str, int, float]]) -> None:
        self._board, self._rows = board, rows

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        if self._board.fails:
            raise ConnectionError("away")
        kind = "validation" if "validation/score" in metrics else "step"
        self._rows.append((kind, step, at))

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        raise AssertionError("no tables are asked for")

    def close(self) -> None:
        if self._board.fails:
            raise ConnectionError("away")


def of_another_version(id_: int, number: int) -> Event:
    data: dict[str, object] = {"step": str(number)} if number % 2 else {}
    return Event(id=id_, at=1.0, kind=EventKind.REWIND, text="back", data=data)


def events(what: list[tuple[str, int]]) -> list[Event]:
    makers = {"step": step, "rewind": rewind, "validation": validation, "other": of_another_version}
    return [makers[kind](id_, number) for id_, (kind, number) in enumerate(what, start=1)]


def test_a_held_out_loss_by_the_names_that_trackers_show() -> None:
    record = held_out_loss(10, 1.25)
    assert validation_metrics(record) == {"validation/loss": 1.25, "validation/accuracy": 0.5}


KINDS = st.sampled_from(["step", "step", "step", "rewind", "validation", "other"])
MOMENTS = st.lists(st.tuples(KINDS, st.integers(0, 6), st.sampled_from(["", "send", "fail", "again"])), max_size=30)


def test_scores_that_complete_a_loss_undo_nothing() -> None:
    """Supervised training that generates: the answers of version 2 are scored when 4 has its loss."""

    def held_out(id_: int, version: int, **scores: object) -> Event:
        data = {**held_out_loss(version, 1.25).model_dump(), **scores}
        return Event(id=id_, at=float(id_), kind=EventKind.VALIDATION, text="held out", data=data)

    scored = {"score_mean": 0.5, "scores": SourceScores(prompts=1, n=1, samples=1, errors=0).model_dump()}
    heard = [step(1, 0), step(2, 1), held_out(3, 2), step(4, 2), step(5, 3), held_out(6, 4), held_out(7, 2, **scored)]
    for at_once in (len(heard), 3, 1):
        board, sent = Board(), Sent()
        for end in range(at_once, len(heard) + at_once, at_once):  # each time another process
            follower = TrackerFollower(sent, board.open)
            assert follower.read(heard[:end])
            follower.send()
        rows = [row[:2] for row in board.segments[0]]
        assert len(rows) == 6 + (at_once < len(heard)), "four steps, two losses, one perhaps again with scores"
        assert (rows.count(("validation", 2)), sent.segment, sent.version, sent.scored) == (1, 0, 4, 2)
    assert [(record.version, record.is_completed) for record in course(heard).validations] == [(2, True), (4, False)]


@given(MOMENTS)
def test_the_newest_segment_is_the_course_of_the_run(moments: list[tuple[str, int, str]]) -> None:
    board, stored = Board(), Sent()

    def save(sent: Sent) -> None:
        nonlocal stored
        stored = copy.copy(sent)

    follower = TrackerFollower(stored, board.open, save)
    known = events([(kind, number) for kind, number, _ in moments])
    begin = 0

    def catch_up(until: int) -> None:
        nonlocal begin
        while not follower.read(known[begin:until]):
            begin = 0
        begin = until

    for at, (_, _, then) in enumerate(moments, start=1):
        if then == "again":  # a new process, which knows what was stored
            follower, begin = TrackerFollower(copy.copy(stored), board.open, save), 0
        catch_up(at)
        board.fails = then == "fail"
        if then == "fail" and (follower._course.steps or follower._course.validations):
            fresh = [record for record in follower._course.steps if record.step > follower.sent.step]
            if fresh:
                with pytest.raises(ConnectionError):
                    follower.send()
        elif then:
            board.fails = False
            follower.send()
    board.fails = False
    catch_up(len(known))
    follower.close()
    wanted = course(known)
    # A process that died before it stored what it had sent sends the same once more.
    rows = list(dict.fromkeys(board.segments.get(follower.sent.segment, [])))
    assert [row for row in rows if row[0] == "step"] == [("step", r.step, r.at) for r in wanted.steps]
    versions = [row[1] for row in rows if row[0] == "validation"]
    assert versions == [record.version for record in wanted.validations]
