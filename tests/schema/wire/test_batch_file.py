"""Recorded batches: which files there are after each step, what can be replayed, and no file that breaks a reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.wire.batch import StepTable
from schema.wire.batch_file import (
    Facts,
    NotRecordedError,
    choose,
    folder_of,
    path_of,
    read,
    read_facts,
    recorded,
    write,
)
from schema.wire.frame import FrameError

FACTS = Facts(job_id="job-1", total_steps=60, ranks=2, settings="", began_from="")
FRAMES = [b"first", b"", b"third"]


def table(step: int, timeline: int = 0) -> StepTable:
    n = len(FRAMES)
    return StepTable(
        step=step, timeline=timeline, policy_epoch=1, group_ids=["e0-p0"], group=[0] * n, index=[0, 1, 2],
        score=[1.0] * n, rewards={}, prompt_tokens=[1] * n, response_tokens=[2] * n, total_tokens=[3] * n,
        oldest_version=[0] * n, newest_version=[0] * n, finish_reason=["stop"] * n,
    )  # fmt: skip


def write_steps(run_dir: Path, *steps: int, keep: int = 8, timeline: int = 0) -> Path:
    folder = folder_of(run_dir)
    for step in steps:
        write(folder, table(step, timeline), FRAMES, FACTS, keep=keep)
    return folder


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    folder = write_steps(tmp_path, 12)
    path = folder / "step-00000012.safetensors"
    assert path == path_of(folder, 12)
    found, frames, facts = read(path)
    assert (found, [bytes(frame) for frame in frames], facts) == (table(12), FRAMES, FACTS)
    assert read_facts(path) == FACTS


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_stay_and_a_rewind_takes_what_followed(tmp_path: Path, keep: int) -> None:
    folder = write_steps(tmp_path, *range(5, 10), keep=keep)
    assert recorded(folder) == list(range(10 - keep, 10))
    (folder / ".step-00000003.safetensors.1a2b").write_bytes(b"left by a writer that was killed")
    (folder / "step-notes.txt").write_text("of a person")
    write_steps(tmp_path, 8, keep=keep, timeline=1)
    assert recorded(folder) == list(range(max(7, 9 - keep), 9)), "9 led elsewhere"
    assert read(path_of(folder, 8))[0].timeline == 1
    write_steps(tmp_path, 9, keep=keep, timeline=1)
    assert recorded(folder) == list(range(max(7, 10 - keep), 10))
    assert sorted(path.name for path in folder.iterdir() if "00" not in path.name) == ["step-notes.txt"]
    assert not list(folder.glob(".*"))


@given(st.lists(st.integers(0, 30), max_size=30), st.integers(1, 5))
def test_never_more_than_asked_for_and_the_newest_of_what_led_here(steps: list[int], keep: int) -> None:
    import tempfile

    history: list[int] = []
    with tempfile.TemporaryDirectory() as directory:
        for step in steps:
            folder = write_steps(Path(directory), step, keep=keep)
            history = [*[one for one in history if one < step], step][-keep:]
            assert recorded(folder) == history


def test_where_it_cannot_be_written_what_is_left_is_whole(tmp_path: Path) -> None:
    folder = write_steps(tmp_path, 1, 2, 3, keep=3)
    path_of(folder, 4).mkdir()
    with pytest.raises(OSError, match="step-00000004"):
        write_steps(tmp_path, 4, keep=3)
    path_of(folder, 4).rmdir()
    assert recorded(folder) == [2, 3], "room was made before"
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("first", "count", "chosen"), [(None, None, [4, 5, 6]), (5, None, [5, 6]), (None, 2, [4, 5]), (6, 1, [6])]
)
def test_steps_are_chosen(first: int | None, count: int | None, chosen: list[int]) -> None:
    assert choose([4, 5, 6], first, count) == chosen


@pytest.mark.parametrize(
    ("steps", "first", "count", "said"),
    [
        ([], None, None, "no batch is recorded"),
        ([4, 5, 7, 9, 10], None, None, "step 6 is not recorded, there are 4 to 5 and 7 and 9 to 10"),
        ([4, 5], 3, None, "step 3 is not recorded, there are 4 to 5"),
        ([4, 5], 9, None, "step 9 is not recorded"),
        ([4, 5], 5, 10**12, "step 6 is not recorded"),
    ],
)
def test_a_step_that_is_not_there_is_named(steps: list[int], first: int | None, count: int | None, said: str) -> None:
    with pytest.raises(NotRecordedError, match=said):
        choose(steps, first, count)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = path_of(write_steps(tmp_path, 3), 3)
    whole = path.read_bytes()
    foreign = whole.replace(b'"run":', b'"fun":')
    wrong = whole.replace(b"job_id", b"jab_id")
    for damaged in (b"", whole[:40], whole[:-1], whole + b"x", b"\xff" * 100, foreign, wrong):
        path.write_bytes(damaged)
        for reader in (read, read_facts):
            with pytest.raises(FrameError, match=r"step-00000003\.safetensors is not a recorded batch"):
                reader(path)
