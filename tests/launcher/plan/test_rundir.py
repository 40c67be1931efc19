"""Run directories: chosen, locked, and given secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

from launcher.display.summary import Collected, RunResult, rows
from launcher.errors import LaunchError
from launcher.job.request import LaunchRequest
from launcher.plan.credentials import base_environment, environment
from launcher.plan.rundir import RunDir, RunTokens, choose, newest, read_json, write_text
from launcher.restarts import Role
from schema.config import Config, load_config
from schema.wire.prompts import write_prompts
from tests.launcher.samples import config, write_job
from tests.launcher.scripts import PYTHON
from tests.support.waiting import PATIENCE

NOW = 1_800_000_000.0


def job(tmp_path: Path, **train: object) -> Config:
    return config(train={"output_dir": str(tmp_path), **train})


def make(run: RunDir, like: Config) -> RunDir:
    run.make()
    run.write_config(like)
    return run


def test_a_new_run_is_named_by_the_time_and_never_shares_a_directory(tmp_path: Path):
    first, resumed = choose(job(tmp_path), False, NOW)
    assert not resumed
    assert first.path.parent == tmp_path
    assert len(first.path.name) == 14
    make(first, job(tmp_path))
    second, _ = choose(job(tmp_path), False, NOW)
    assert second.path.name == first.path.name + "-1"


def test_resume_takes_the_newest_run(tmp_path: Path):
    for age, name in ((30, "b"), (10, "a"), (20, "c")):
        run = make(RunDir(tmp_path / name), job(tmp_path))
        os.utime(run.config_json, (NOW - age, NOW - age))
    (tmp_path / "no-run").mkdir()
    run, resumed = choose(job(tmp_path), True, NOW)
    assert resumed
    assert run.path.name == "a"
    found = newest(tmp_path)
    assert found is not None
    assert found.path.name == "a"


def test_resume_of_a_named_run(tmp_path: Path):
    named = job(tmp_path, timestamp="mine")
    make(RunDir(tmp_path / "mine"), named)
    make(RunDir(tmp_path / "other"), named)
    assert choose(named, True, NOW)[0].path.name == "mine"


def test_resume_of_nothing_starts_afresh(tmp_path: Path):
    run, resumed = choose(job(tmp_path / "none"), True, NOW)
    assert not resumed
    assert run.path.parent == tmp_path / "none"


def test_a_named_run_is_not_mixed_with_an_old_one(tmp_path: Path):
    named = job(tmp_path, timestamp="mine")
    run, _ = choose(named, False, NOW)
    make(run, named)
    with pytest.raises(LaunchError, match="holds a run already") as caught:
        choose(named, False, NOW)
    assert caught.value.exit_code == 2
    assert "--resume" in caught.value.hint


def test_a_live_run_is_refused(tmp_path: Path):
    named = job(tmp_path, timestamp="mine")
    run = make(RunDir(tmp_path / "mine"), named)
    run.lock()
    try:
        assert run.is_alive()
        assert RunDir(run.path).is_alive()
        with pytest.raises(LaunchError, match=r"runs in .*mine already"):
            choose(named, False, NOW)
        with pytest.raises(LaunchError, match=r"runs in .*mine already"):
            RunDir(run.path).lock()
    finally:
        run.unlock()
    assert not run.is_alive()
    again = RunDir(run.path)
    again.lock()
    again.unlock()


def test_a_file_system_without_locks_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    run = make(RunDir(tmp_path / "mine"), job(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LaunchError, match=r"output_dir: .* cannot be locked: No locks available"):
        run.lock()


def test_two_that_begin_in_the_same_second_take_two_directories(tmp_path: Path):
    first, _ = choose(job(tmp_path), False, NOW)
    second, _ = choose(job(tmp_path), False, NOW)
    assert (first.path, first.take(), second.take()) == (second.path, True, False)
    assert choose(job(tmp_path), False, NOW)[0].take()


def test_what_ended_is_summary_with_the_places_of_today(tmp_path: Path):
    run = make(RunDir(tmp_path / "mine"), job(tmp_path))
    assert run.summary() is None
    run.summary_json.write_text(json.dumps({"outcome": "exploded"}))
    assert run.summary() is None, "not a file of ours"
    summary = {"outcome": "finished", "run_dir": str(run.path), "final_model": str(run.path / "final")}
    run.summary_json.write_text(json.dumps(summary))
    moved = RunDir(run.path.rename(tmp_path / "moved"))
    summary |= {"run_dir": str(moved.path), "final_model": str(moved.path / "final")}
    assert moved.summary() == summary


def test_a_run_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    run = make(RunDir(tmp_path / "mine"), job(tmp_path))
    (run.locks / "launcher.lock").mkdir()
    with pytest.raises(LaunchError, match=r"mine cannot be written to: Is a directory") as caught:
        run.lock()
    assert "as the user who started it" in caught.value.hint


def test_processes_of_a_killed_launcher_are_waited_for(tmp_path: Path):
    run = make(RunDir(tmp_path / "mine"), job(tmp_path))
    held = f"""
import fcntl, os, sys, time
handle = os.open({str(run.locks / "workers.lock")!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_SH)
print('held', flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([*PYTHON, held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(LaunchError, match=r"still run \(workers\)"):
        run.wait_until_left(0.2)
    process.communicate()
    run.wait_until_left(PATIENCE)


def test_the_config_is_written_with_its_place_and_can_be_run_again(tmp_path: Path):
    path = write_job(tmp_path)
    loaded = load_config(path, ["redis.url=redis://me:hunter2@host:1234/0"])
    run = RunDir(tmp_path / "out" / "mine")
    make(run, loaded)
    written = json.loads(run.config_json.read_text())
    assert (written["train"]["output_dir"], written["train"]["timestamp"]) == (str(tmp_path / "out"), "mine")
    assert "hunter2" not in run.config_json.read_text() + (run.path / "config.toml").read_text()
    Config.model_validate(written)
    again = load_config(run.path / "config.toml")
    assert again.train.timestamp == ""
    assert again.rollout == Config.model_validate(written).rollout
    assert tomllib.loads((run.path / "config.toml").read_text())["train"]["resume"] is False


def test_tokens_are_private_and_distinct(tmp_path: Path):
    run = make(RunDir(tmp_path / "mine"), job(tmp_path))
    tokens = RunTokens.fresh()
    assert len({tokens.user, tokens.rollout, tokens.policy}) == 3
    assert len(tokens.user) >= 43
    run.write_tokens(tokens)
    folder = run.path / ".tokens"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "user": 0o600,
        "rollout": 0o600,
    }
    assert run.read_token() == tokens.user
    assert run.read_token("rollout") == tokens.rollout
    assert RunDir(tmp_path / "none").read_token() is None


def test_each_role_gets_its_own_secrets_only():
    tokens = RunTokens("u-secret", "r-secret", "p-secret")
    given = {role: environment(role, tokens, "http://c", "redis://r", "w") for role in Role}
    assert given[Role.ROLLOUT] == {"COSMOS_CONTROLLER_URL": "http://c", "COSMOS_TOKEN": "r-secret"}
    assert given[Role.POLICY] == {"COSMOS_CONTROLLER_URL": "http://c", "COSMOS_TOKEN": "p-secret"}
    assert given[Role.CONTROLLER] == {
        "COSMOS_TOKEN_USER": "u-secret", "COSMOS_TOKEN_ROLLOUT": "r-secret", "COSMOS_TOKEN_POLICY": "p-secret",
        "COSMOS_REDIS_URL": "redis://r", "COSMOS_REDIS_PASSWORD": "w",
    }  # fmt: skip
    assert given[Role.DATA] == given[Role.REDIS] == {}


def test_the_users_environment_is_passed_on_without_secrets_of_jobs():
    secrets = ("TOKEN", "TOKEN_USER", "REDIS_PASSWORD", "CONTROLLER_URL", "REPLICA_NAME", "REPLICA_SECRET")
    of_jobs = {f"COSMOS_{name}": "t" for name in secrets} | {"COSMOS_PARENT_PID": "1"}
    base = base_environment({"HOME": "/h", "HF_TOKEN": "hub", **of_jobs})
    assert base["HOME"] == "/h"
    assert base["HF_TOKEN"] == "hub"
    assert base["PYTHONUNBUFFERED"] == "1"
    assert "t" not in base.values()
    assert "COSMOS_PARENT_PID" not in base


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"train\.output_dir") as caught:
        RunDir(tmp_path / "file" / "run").make()
    assert caught.value.exit_code == 2


def test_what_killed_writers_began_is_swept(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.make()
    (run.path / "batches").mkdir()
    kept = [".tokens/user", "checkpoints/latest", "data/train.safetensors", ".hidden", "config.json"]
    begun = [".config.json.123", "data/.train.safetensors.77", "checkpoints/.latest.0a1b2c3d"]
    for name in [*kept, *begun, "batches/.step-00000003.safetensors.0a1b2c3d"]:
        (run.path / name).write_text("x")
    run.sweep()
    files = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
    assert files == sorted(kept)


def test_json_files_are_whole_or_none(tmp_path: Path):
    path = tmp_path / "a.json"
    write_text(path, '{"a": 1}')
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"a": ')
    assert read_json(path) is None
    assert read_json(tmp_path / "none") is None
    path.write_text("[1]")
    assert read_json(path) is None


def test_a_directory_of_directories_of_runs_has_a_newest_run(tmp_path: Path):
    run = tmp_path / "addition" / "20260101"
    (run / "logs").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    assert newest(tmp_path) is None
    found = newest(tmp_path, nested=True)
    assert found is not None
    assert found.path == run
    below = newest(run.parent, nested=True)
    assert below is not None
    assert below.path == run, "the model of a run is none"


def test_time_and_restarts_add_up_over_the_starts_of_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.earlier() == {"starts": 0, "elapsed_s": 0.0, "restarts": {}}
    run.forget_earlier_end()  # a first start that was killed before it wrote anything
    for restarts in (2, 1):
        process = {"role": "rollout", "restarts": restarts}
        launcher = {"started_at": 100.0, "seen_at": 160.0, "processes": {"rollout-0": process}}
        run.launcher_json.write_text(json.dumps(launcher))
        run.forget_earlier_end()
    assert run.earlier() == {"starts": 2, "elapsed_s": 120.0, "restarts": {"rollout-0": 3}}
    collected = Collected()
    summary = RunResult(0, "finished", "", tmp_path, 30.0, collected, {"rollout-0": 1}, run.earlier()).summary()
    assert (summary["starts"], summary["total_elapsed_s"], summary["restarts"]) == (3, 150.0, {"rollout-0": 4})
    assert dict(rows(summary))["time"] == "30s (2m30s over 3 starts)"


def test_rows_of_another_configuration_are_not_used_whatever_became_of_its_start(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    first, other = job(tmp_path, seed=1), job(tmp_path, seed=2)
    assert not run.write_start(first, {})[1]
    write_prompts(run.prompts, [[1]], [{}])
    assert run.write_start(first, {})[1]
    assert not run.write_start(other, {})[1]  # a start that ends before its rows are prepared
    assert not run.write_start(other, {})[1]
    assert not run.prompts.exists()
    assert (run.path / "data" / "earlier.train").exists()


@pytest.mark.parametrize("resume", ["/elsewhere/checkpoints/step-00000020", True, False])
def test_a_run_goes_on_from_where_it_began_until_it_has_a_checkpoint(tmp_path: Path, resume: str | bool) -> None:
    run = make(RunDir(tmp_path / "run"), job(tmp_path, resume=resume))
    request = LaunchRequest([], ["train.seed=5"], {}, resume=str(run.path))
    assert request.continued().overrides[:2] == [f"train.resume={json.dumps(resume)}", "train.seed=5"]
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert request.continued().overrides[0] == "train.seed=5"
