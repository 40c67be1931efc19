from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from policy_worker.checkpoint import find_checkpoint, newest_in
from policy_worker.errors import SettingsError
from tests.policy_worker.material import make_config


def make_checkpoint(directory: Path, step: int, *, complete: bool = True, latest: bool = False) -> Path:
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    if complete:
        (path / "trainer.json").write_text(json.dumps({"format": 1, "step": step, "timeline": 0, "world": 1}))
    if latest:
        (directory / "latest").write_text(path.name)
    return path


def config_with(resume: Any):
    return make_config(train={"resume": resume})


def test_the_pointer_says_which_is_newest(tmp_path: Path):
    make_checkpoint(tmp_path, 20)
    make_checkpoint(tmp_path, 10, latest=True)  # after a rewind, fewer steps are newer
    found = newest_in(tmp_path)
    assert found is not None
    assert (found.path.name, found.step) == ("step-00000010", 10)


def test_without_a_good_pointer_most_steps_win(tmp_path: Path):
    make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 15)
    make_checkpoint(tmp_path, 25, complete=False, latest=True)
    found = newest_in(tmp_path)
    assert found is not None
    assert found.step == 15
    assert newest_in(tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 99, "step": 3}'])
def test_a_checkpoint_without_a_good_last_file_is_none(tmp_path: Path, text: str):
    (make_checkpoint(tmp_path, 3, complete=False) / "trainer.json").write_text(text)
    assert newest_in(tmp_path) is None


def test_a_run_continues_itself_whatever_it_began_from(tmp_path: Path):
    make_checkpoint(tmp_path / "b" / "checkpoints", 50, latest=True)
    own = make_checkpoint(tmp_path / "a" / "checkpoints", 4, latest=True)
    for resume in (False, True, str(tmp_path / "b" / "checkpoints" / "step-00000050")):
        found = find_checkpoint(config_with(resume), tmp_path / "a")
        assert found is not None
        assert found.path == own


def test_resume_true_takes_the_newest_of_the_neighbours(tmp_path: Path):
    for number, name in enumerate(("x", "y", "z")):
        path = make_checkpoint(tmp_path / name / "checkpoints", 10 - number, latest=True)
        os.utime(path / "trainer.json", (1000 + number % 2, 1000 + number % 2))
    (tmp_path / "a").mkdir()
    found = find_checkpoint(config_with(True), tmp_path / "a")
    assert found is not None
    assert found.path.parts[-3] == "y"
    assert find_checkpoint(config_with(False), tmp_path / "a") is None


def test_resume_from_a_path(tmp_path: Path):
    path = make_checkpoint(tmp_path / "b" / "checkpoints", 7)
    for written in (path, path.parent, path.parent.parent):
        found = find_checkpoint(config_with(str(written)), tmp_path / "a")
        assert found is not None
        assert found.path == path
    with pytest.raises(SettingsError, match=r"train\.resume = .*nothing.*no complete checkpoint"):
        find_checkpoint(config_with(str(tmp_path / "nothing")), tmp_path / "a")


def test_nothing_to_resume_from_starts_afresh(tmp_path: Path):
    (tmp_path / "a").mkdir()
    assert find_checkpoint(config_with(True), tmp_path / "a") is None
