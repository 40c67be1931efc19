"""status, stop, pause, export and --resume of runs that have ended, were killed, or are only just starting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.display.summary import Collected, RunResult
from launcher.plan.rundir import RunDir, RunTokens
from schema.config import load_config
from tests.launcher.cli import cosmos
from tests.launcher.samples import job_status, write_job


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    """A run that ended and left its summary."""
    config = load_config(write_job(tmp_path))
    run = RunDir(tmp_path / "out" / "mine")
    run.make()
    run.write_config(config)
    run.write_tokens(RunTokens.fresh())
    RunResult(0, "finished", "", run.path, 12.0, Collected(status=job_status()), {}).write()
    return run


def test_a_url_needs_a_token_and_a_controller():
    cosmos("status", "http://127.0.0.1:9").complains(2, "COSMOS_TOKEN is not set", ".tokens/user")
    cosmos("status", "http://127.0.0.1:9", COSMOS_TOKEN="t").complains(1, "no answer from the controller")


def test_where_nothing_ran(tmp_path: Path):
    for arguments in (["status"], ["--resume"]):
        cosmos(*arguments, cwd=tmp_path).complains(2, "no ./outputs here")
    (tmp_path / "outputs").mkdir()
    cosmos("status", cwd=tmp_path).complains(2, "holds no run")


def test_a_run_that_has_ended(tmp_path: Path, ended: RunDir):
    for target in (ended.path, ended.path.parent, tmp_path / "run.toml"):
        cosmos("status", target).says(0, "has ended", "steps: 12 of 60")
    found = json.loads(cosmos("status", ended.path, "--json").stdout)
    assert not found["alive"]
    assert found["summary"]["outcome"] == "finished"
    for command in ("stop", "pause", "resume", "checkpoint", "profile"):
        run = cosmos(command, ended.path).complains(1, "has finished")
        assert "--resume" not in run.stderr
    for arguments in (["--resume", ended.path], ["--config", tmp_path / "run.toml", "--resume"]):
        cosmos(*arguments).says(0, "has finished its 60 steps: nothing to resume")
    cosmos("--config", tmp_path / "run.toml", "--set", "train.timestamp=mine").complains(2, "holds a run already")


def test_a_run_that_was_killed(tmp_path: Path, ended: RunDir):
    ended.summary_json.unlink()
    cosmos("status", ended.path).says(1, "left no summary", f"`cosmos-launch --resume {ended.path}` goes on")
    found = json.loads(cosmos("status", ended.path, "--json").stdout)
    assert (found["alive"], found["state"], found["summary"]) == (False, "killed", None)
    planned = cosmos("--resume", ended.path, "--set", "train.max_num_steps=7", "--dry-run", "--json")
    assert json.loads(planned.stdout)["run_dir"] == str(ended.path), planned.stderr
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    ended.path.rename(moved)
    planned = cosmos("--resume", moved, "--dry-run", "--json")
    assert json.loads(planned.stdout)["run_dir"] == str(moved), "a run goes on where it lies now"
    (moved / "config.toml").unlink()
    assert "holds no config.toml" in cosmos("--resume", moved).stderr
    assert "does not exist" in cosmos("--resume", ended.path).stderr


def test_a_run_that_is_starting(tmp_path: Path, ended: RunDir):
    ended.lock()
    try:
        run = cosmos("status", ended.path)
        asked = cosmos("pause", ended.path)
        again = cosmos("--config", tmp_path / "run.toml", "--resume")
    finally:
        ended.unlock()
    run.says(0, "is starting")
    asked.complains(1, "its controller is not there yet")
    again.complains(2, f"already (its launcher is pid {os.getpid()})")


def test_what_cannot_be_exported(tmp_path: Path, ended: RunDir):
    for arguments, words in (
        ([ended.path], "has no checkpoint"),
        ([ended.path, "--dtype", "int8"], "--dtype int8 is unknown"),
    ):
        cosmos("export", *arguments, "-o", tmp_path / "model").complains(2, words)
    (ended.path / "final").mkdir()
    (ended.path / "final" / "config.json").write_text("{}")
    assert f"its model is in {ended.path}/final" in cosmos("export", ended.path, "-o", "model").stderr


def test_a_run_of_somebody_else_is_not_taken_for_a_dead_one(ended: RunDir):
    (ended.locks / "launcher.lock").symlink_to("launcher.lock")  # nobody can open it, not even root
    for arguments in (["status"], ["stop"], ["stop", "--now"], ["pause"], ["--resume"]):
        cosmos(*arguments, ended.path).complains(2, "cannot be determined")
