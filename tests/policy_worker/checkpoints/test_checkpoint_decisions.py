"""When to save, what to keep, what to read: decisions over plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy_worker.checkpoints.find import chain_of, is_ancestor
from policy_worker.checkpoints.layout import DataFacts, FileFacts, FoundCheckpoint, share_of
from policy_worker.checkpoints.load import (
    CheckpointParts,
    check_data,
    parts_to_load,
    schedule_differences,
    schedule_facts,
    schedule_of,
)
from policy_worker.checkpoints.retention import best, expired, scored
from policy_worker.checkpoints.save import Rhythm
from policy_worker.errors import CheckpointError
from policy_worker.trained.lr_schedule import Schedule
from tests.policy_worker.checkpoint_material import manifest


def found(step: int, timeline: int = 0, lineage: list[tuple[int, int]] | None = None) -> FoundCheckpoint:
    facts = {"timeline": timeline, "lineage": lineage or [(timeline, 0)]}
    return FoundCheckpoint(Path(f"/c/step-{step:08d}-{timeline}"), manifest(step, **facts))


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(4, 0, [4, 8, 9]), (100, 1, [3, 6, 9]), (100, 2, [6, 9]), (4, 2, [4, 6, 8, 9])]
)
def test_saves_come_by_steps_by_epochs_and_at_the_end(steps: int, epochs: int, expected: list[int]):
    rhythm = Rhythm(True, steps, epochs)
    due = [
        step
        for step in range(1, 10)
        if rhythm.due(step, last=step == 9, data_passes=step // 3, data_passes_before=(step - 1) // 3)
    ]
    assert due == expected
    assert not Rhythm(False, 1, 1).due(1, last=True, data_passes=1, data_passes_before=0)


def test_an_epoch_that_ends_between_two_questions_is_not_missed():
    assert Rhythm(True, 100, 2).due(7, last=False, data_passes=5, data_passes_before=3)
    assert not Rhythm(True, 100, 2).due(7, last=False, data_passes=3, data_passes_before=2)


def names(kept: list[FoundCheckpoint], deleted: list[FoundCheckpoint]) -> list[int]:
    return sorted(one.step for one in kept if one not in deleted)


@pytest.mark.parametrize(
    ("max_keep", "preferred", "held", "expected"),
    [
        (3, None, [], [30, 40, 50]),
        (3, 10, [], [10, 40, 50]),
        (1, None, [], [50]),
        (1, 10, [], [10, 50]),  # neither the newest nor the best goes
        (1, 10, [20], [10, 20, 50]),
        (2, 50, [], [40, 50]),
        (-1, None, [], [10, 20, 30, 40, 50]),
        (9, None, [], [10, 20, 30, 40, 50]),
    ],
)
def test_what_stays(max_keep: int, preferred: int | None, held: list[int], expected: list[int]):
    complete = {step: found(step) for step in (10, 20, 30, 40, 50)}
    chosen = None if preferred is None else complete[preferred]
    deleted = expired(list(complete.values()), complete[50], chosen, [complete[step] for step in held], max_keep)
    assert names(list(complete.values()), deleted) == expected


def test_what_led_to_the_newest_stays_before_what_was_left():
    left, ancestor = found(30), found(10)
    newest = found(15, 1, [(0, 0), (1, 10)])
    assert expired([left, ancestor, newest], newest, None, [], 2) == [left]


def test_the_best_is_the_highest_score_and_the_newer_of_equals():
    first, middle, last = complete = [found(step) for step in (10, 20, 30)]
    assert best(scored(complete, last, {10: 0.5, 20: 0.7, 25: 0.9})) == (middle, 0.7)
    assert best(scored([last, *complete[:2]], last, {10: 0.7, 20: 0.7})) == (middle, 0.7)
    assert best(scored(complete, last, {})) is None
    assert scored(complete, first, {10: 0.5, 20: 0.7}) == [(first, 0.5)]


def test_scores_are_of_the_way_that_was_taken():
    """A checkpoint of a timeline that was left has the step of a version that was validated in this one."""
    newest, left = found(20, 1, [(0, 0), (1, 10)]), found(15)
    assert scored([newest, left], newest, {15: 0.9, 20: 0.1}) == [(newest, 0.1)]


def test_ancestors_are_on_the_way_that_was_taken():
    newest = manifest(25, timeline=3, lineage=[(0, 0), (1, 10), (3, 20)])
    way = {(0, 5), (0, 10), (1, 15), (1, 20), (3, 22)}
    for timeline, step in {*way, (0, 11), (1, 21), (2, 12), (3, 26)}:
        assert is_ancestor(manifest(step, timeline=timeline), newest) is ((timeline, step) in way)


def test_older_ones_to_fall_back_to_are_ancestors_newest_first():
    lineage = [(0, 0), (1, 10)]
    newest, middle, first, left = found(20, 1, lineage), found(15, 1, lineage), found(10), found(30)
    assert chain_of(newest, [left, first, newest, middle]) == [newest, middle, first]


EVERYTHING: dict[str, Any] = {"contents": ["model", "optimizer", "extra"], "exported": True}


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        ({}, None, CheckpointParts("state", True, True)),
        ({}, ["model"], CheckpointParts("state", False, False)),
        ({}, ["hf_model", "extra"], CheckpointParts("export", False, True)),
        ({"contents": ["optimizer"]}, None, CheckpointParts("export", True, False)),
        ({"contents": ["model"], "exported": False}, None, CheckpointParts("state", False, False)),
    ],
)
def test_what_is_read(facts: dict[str, Any], wanted: list[str] | None, expected: CheckpointParts):
    assert parts_to_load(manifest(1, **{**EVERYTHING, **facts}), wanted) == expected


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        ({"contents": ["model"]}, ["model", "optimizer"], "asks for optimizer, and it holds hf_model, model"),
        ({"exported": False}, ["hf_model"], "leave hf_model out"),
        ({"contents": ["extra"], "exported": False}, None, "no weights"),
    ],
)
def test_what_is_not_there_cannot_be_read(facts: dict[str, Any], wanted: list[str] | None, words: str):
    with pytest.raises(CheckpointError, match=words):
        parts_to_load(manifest(1, **{**EVERYTHING, **facts}), wanted)


def test_a_schedule_survives_and_differences_are_named():
    schedule = Schedule(40, 0.1, 0.0, 0.5, "linear", 0.2)
    facts = schedule_facts(schedule, 1e-3)
    assert schedule_of(type(facts).model_validate_json(facts.model_dump_json())) == schedule
    other = schedule_facts(Schedule(80, 4, 0.0, 0.5, "linear", 0.2), 1e-4)
    assert schedule_differences(facts, facts) == []
    new = {"further_lrs", "decay_steps", "num_cycles", "wsd_decay_type"}
    assert schedule_of(type(facts).model_validate(facts.model_dump(exclude=new))) == schedule, "an older one"
    several = schedule_facts(schedule, 1e-2, 1e-3)
    assert (several.peak_lr, several.further_lrs) == (1e-2, (1e-3,))
    differences = schedule_differences(facts, other)
    assert [line.partition(":")[0] for line in differences] == [
        "train.optm_lr", "total steps", "train.optm_warmup_steps",
    ]  # fmt: skip
    assert "0.001 in the checkpoint, 0.0001 configured" in differences[0]


@pytest.mark.parametrize("field", ["rows", "seed", "batch", "shuffle"])
def test_other_rows_are_refused(field: str):
    saved = DataFacts(rows=32, seed=1, shuffle=True, batch=8, position=16)
    check_data(saved, saved.model_copy(update={"position": 24}))
    check_data(saved, None)
    with pytest.raises(CheckpointError, match="the position in the data would be another"):
        check_data(saved, saved.model_copy(update={field: getattr(saved, field) + 1}))


def test_other_rows_of_the_same_number_are_said(caplog: pytest.LogCaptureFixture):
    saved = DataFacts(rows=32, seed=1, shuffle=True, batch=8, position=16, digest="a")
    check_data(saved, saved.model_copy(update={"digest": ""}))
    assert not caplog.records
    check_data(saved, saved.model_copy(update={"digest": "b"}))
    assert "are not those of the checkpoint" in caplog.text


def test_rows_that_come_later_are_taken():
    saved = DataFacts(rows=32, seed=1, shuffle=True, batch=8, position=32)
    now = saved.model_copy(update={"rows": 48, "grown": (16, 32)})
    check_data(saved, now)
    for update in ({"position": 40}, {"rows": 24}, {"seed": 2}):
        with pytest.raises(CheckpointError, match="the position in the data would be another"):
            check_data(saved.model_copy(update=update), now)
    assert "grown" not in now.model_dump()


def test_a_checkpoint_of_a_trainer_that_knew_the_early_rows_alone_is_taken():
    saved = DataFacts(rows=32, seed=1, shuffle=True, batch=8, position=400)
    now = saved.model_copy(update={"rows": 1000, "early": 32})
    check_data(saved, now)
    check_data(now, now)
    for update in ({"early": 40}, {"early": 0}):
        with pytest.raises(CheckpointError, match="the position in the data would be another"):
            check_data(saved, now.model_copy(update=update))
    assert not {"early", "unfinished"} & now.model_dump().keys()


def test_ranks_share_the_files():
    files = {f"f{n}": FileFacts(bytes=n * 100, hash="") for n in range(7)}
    shares = [share_of(files, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert shares[0][0] == "f6"
    assert share_of(files, 0, 1) == sorted(files, reverse=True)
