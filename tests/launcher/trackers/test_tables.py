"""Which answers trackers show, and in which columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.trackers.tables import AnswerTables, spread
from schema.wire import sample_file
from tests.schema.wire.test_sample_file import record

PROMPTS = [record(4, index, kind="validation", group=f"v2-p{prompt}") for prompt in range(6) for index in range(2)]


@pytest.mark.parametrize(
    ("most", "chosen"),
    [
        (1, [(0, 0)]),
        (3, [(0, 0), (2, 0), (4, 0)]),
        (6, [(prompt, 0) for prompt in range(6)]),
        (8, [(0, 0), (0, 1), (1, 1), (2, 0), (3, 0), (3, 1), (4, 1), (5, 0)]),
        (99, [(prompt, index) for prompt in range(6) for index in range(2)]),
    ],
)
def test_answers_are_spread_over_prompts(most: int, chosen: list[tuple[int, int]]) -> None:
    assert [(int(one.group[-1]), one.index) for one in spread(PROMPTS, most)] == chosen


def test_a_validation_that_began_anew_is_shown_once_and_what_was_not_trained_is_not(tmp_path: Path) -> None:
    broken = record(4, kind="validation", group="v1-p0", score=9.0)
    trained = [
        record(4, rewards={"b": 1.0, "a": 2.0}, source="gsm"),
        record(4, 1, dropped="stale"),
        record(4, 2, None),
    ]
    sample_file.Writer(sample_file.folder_of(tmp_path), 10**6).append([broken, *PROMPTS, *trained])
    tables = AnswerTables(tmp_path, training=9, validation=99)
    held_out, step = tables.of_validation(4), tables.of_step(4)
    assert held_out is not None
    assert step is not None
    assert {row[held_out.columns.index("group")] for row in held_out.rows} == {one.group for one in PROMPTS}
    assert step.columns[6:] == ["score", "reward/a", "reward/b"]
    assert step.rows == [[4, "gsm", "e0-p0", "what?", "answer 4", "", 0.0, 2.0, 1.0]]
    assert tables.of_step(5) is None
    assert AnswerTables(tmp_path).of_validation(4) is None
