"""Samples on disk: which are chosen, found, and kept when there is no room for all."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.wire import sample_file
from schema.wire.messages import MOST_TEXT, SampleRecord

ROOM = 10**6


def record(step: int, index: int = 0, score: float | None = 0.0, **changes: Any) -> SampleRecord:
    fields = {
        "prompt": "what?", "answer": f"answer {step}", "at": float(step), "kind": "train", "step": step,
        "timeline": 0, "group": "e0-p0", "index": index, "ending": "finished", "finish_reason": "stop",
        "prompt_tokens": 1, "response_tokens": 2, "oldest_version": 0, "newest_version": 0, "score": score,
        "error": None if score is not None else "ValueError: no",
    }  # fmt: skip
    return SampleRecord.model_validate({**fields, **changes})


def test_the_newest_step_the_best_and_the_failed_are_found(tmp_path: Path) -> None:
    assert sample_file.find(tmp_path) == []
    known = [record(0, score=0.5), record(1, 1, 0.9), record(1, 0, -1.0), record(2, score=None)]
    for one in [*known, record(7, kind="validation", score=3.0)]:
        sample_file.Writer(tmp_path, ROOM).append([one])
    find = sample_file.find
    assert find(tmp_path, kind="train") == known[3:]
    assert find(tmp_path, step=1) == [known[2], known[1]]
    assert find(tmp_path, kind="train", order="best", limit=2) == [known[1], known[0]]
    assert find(tmp_path, order="best", limit=1)[0].kind == "validation"
    assert find(tmp_path, order="worst", limit=1) == [known[2]]
    assert find(tmp_path, order="errors") == [known[3]]
    assert find(tmp_path, order="best", newest=1, kind="train") == []


def test_groups_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    groups = ["e0-p2", "e0-p10", "e1-p1"]
    sample_file.Writer(tmp_path, ROOM).append([record(0, group=group) for group in reversed(groups)])
    assert [one.group for one in sample_file.find(tmp_path)] == groups


def test_junk_and_what_was_written_twice_are_passed_over(tmp_path: Path) -> None:
    path = sample_file.path_of(tmp_path, "train", 3)
    path.write_bytes(b'not JSON\n{"prompt": "half')
    for one in (record(3, score=0.1), record(3, score=0.2)):
        sample_file.Writer(tmp_path, ROOM).append([one])
    (tmp_path / "step-x.jsonl").write_text("another's")
    assert [one.score for one in sample_file.find(tmp_path)] == [0.2]


def test_what_a_rewind_undid_is_hidden_but_for_failures(tmp_path: Path) -> None:
    known = [record(step, score=float(step)) for step in range(5)]
    versions = [record(version, kind="validation", score=9.0 + version) for version in (2, 3)]
    failed = record(4, 1, None)
    sample_file.Writer(tmp_path, ROOM).append([*known, *versions, failed])
    (tmp_path / sample_file.REWINDS).write_bytes(b'{"timeline": 9, "st')
    sample_file.Writer(tmp_path, ROOM).append([], [sample_file.Rewind(timeline=1, step=2)])
    again = record(2, score=-1.0, timeline=1)
    sample_file.Writer(tmp_path, ROOM).append([again])
    find = partial(sample_file.find, tmp_path)
    assert find(kind="train") == find(step=2, kind="train") == [again]
    assert find(step=3) == []
    assert find(order="best") == [versions[0], known[1], known[0], again]
    assert find(order="worst", limit=1) == [again]
    assert find(order="errors") == find(order="errors", committed=3) == [failed]
    assert find(kind="train", newest=1, committed=3) == []
    assert find(kind="train", newest=1, committed=2) == [again]


def test_the_oldest_files_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    writer = sample_file.Writer(tmp_path, 5500)
    for step in range(6):
        assert not writer.append([record(step, prompt="x" * 1000)])
    assert [step for _, step in sample_file.files(tmp_path)] == [2, 3, 4, 5]
    os.utime(sample_file.path_of(tmp_path, "train", 2), (2e9, 2e9))  # trained again after a rewind
    assert not sample_file.Writer(tmp_path, 5500).append([record(1, prompt="x" * 1000)])
    assert [step for _, step in sample_file.files(tmp_path)] == [1, 2, 4, 5]


def test_no_number_of_failures_takes_more_than_its_share(tmp_path: Path) -> None:
    writer, failed = sample_file.Writer(tmp_path, 100_000), 0
    for first in range(0, 400, 100):
        failures = [record(0, index, None, prompt="x" * 300) for index in range(first, first + 100)]
        failed += writer.append(failures)
    kept = len(sample_file.find(tmp_path, order="errors", limit=999))
    assert (kept + failed, kept > 1) == (400, True)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000 // 32
    assert writer.append([record(0, 999, 0.5)]) == 0
    assert writer.append([record(1, prompt="x" * 25_000)]) == 1
    assert [step for _, step in sample_file.files(tmp_path)] == [0]


@pytest.mark.parametrize(("text", "length"), [("short", 5), ("x" * 10**6, MOST_TEXT + 40), ("\ud800", 1)])
def test_long_texts_are_cut_in_the_middle(text: str, length: int) -> None:
    cut = sample_file.cut(text)
    assert len(cut) <= length
    assert cut.encode()
    assert (cut[0], cut[-1]) == ("?", "?") if text == "\ud800" else (text[0], text[-1])


@given(st.integers(1, 64), st.integers(0, 80), st.integers(0, 1000))
def test_as_many_groups_of_each_step_are_chosen_as_wanted(per_step: int, wanted: int, first: int) -> None:
    chosen = [sample_file.is_chosen(f"e0-p{first + at}", per_step, wanted) for at in range(per_step)]
    assert sum(chosen) == min(per_step, wanted)


def test_groups_of_several_sources_are_chosen_in_every_step() -> None:
    """Sources whose positions go on alike: by these, all groups of a step are chosen, and none of the next ones."""
    steps = [[f"e0-p{step}-s{source}" for source in range(8)] for step in range(200)]
    counts = [sum(sample_file.is_chosen(name, 8, 2) for name in names) for names in steps]
    assert 300 < sum(counts) < 500
    assert max(counts) < 8
    assert sum(count == 0 for count in counts) < 50
    assert all(sample_file.is_chosen(name, 8, 9) and not sample_file.is_chosen(name, 8, 0) for name in steps[0])


def test_a_validation_is_not_chosen() -> None:
    assert not sample_file.is_chosen("nothing", 1, 1)
