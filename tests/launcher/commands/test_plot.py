"""`cosmos-launch plot`: pictures of runs from their event files, with gaps, rewinds and texts that are no font's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.commands.plot import PlottedCurves
from schema.wire import event_file, sample_file
from tests.launcher.cli import ROOT, cosmos
from tests.schema.wire.test_event_file import rewind, step, validation
from tests.schema.wire.test_sample_file import record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps that went back once; its validations were kept as text."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    rewards = {"boxed_math": 1.0, "format": 0.2}
    config = {"policy": {"model_name_or_path": "a/b/model"}, "train": {"train_policy": {"reward_function": rewards}}}
    (run / "config.json").write_text(json.dumps(config))
    launcher = {"cores": 2, "started_at": 10.0, "seen_at": 80.0, "pid": 1}
    (run / "launcher.json").write_text(json.dumps(launcher))
    events = [step(1, 0, reward_mean=0.1), validation(2, 0), step(3, 1), step(4, 2, reward_mean=9.0)]
    events += [rewind(5, 2), step(6, 2, reward_mean=0.3), validation(7, 3)]
    event_file.append(event_file.path_of(run), events)
    for version, answer in ((0, "$\x05before\n"), (3, "after $x$" * 40)):
        written = record(version, kind="validation", answer=answer, score=float(version))
        sample_file.Writer(sample_file.folder_of(run), 10**6).append([written])
    undone = [record(9, kind="validation", answer="undone")]
    sample_file.Writer(sample_file.folder_of(run), 10**6).append(undone, [sample_file.Rewind(timeline=1, step=8)])
    return run


def test_one_run_and_several_are_drawn(run_dir: Path, tmp_path: Path) -> None:
    answer = cosmos("plot", run_dir, "-o", tmp_path / "one.png")
    answer.says(0, "one.png: run")
    assert answer.stderr == ""
    cosmos("plot", run_dir, "-o", tmp_path / "without").says(0, "without.png: run")
    assert (tmp_path / "without.png").exists()
    cosmos("plot", run_dir, run_dir, "-o", tmp_path / "two.svg", "--json").says(0, '"runs"')
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "two.svg").read_bytes()


def test_what_is_drawn(run_dir: Path) -> None:
    curves = PlottedCurves.read(run_dir)
    steps, rewards = curves.metric("reward_mean")
    assert steps == [0, 1, 2]
    assert (rewards[0], rewards[2]) == (0.1, 0.3)
    assert rewards[1] != rewards[1], "a gap"
    assert curves.highest_reward() == 1.2
    assert curves.title() == "b/model, 2 cores, 1m10s"
    ((before, after),) = curves.before_and_after()
    assert (before.step, after.step) == (0, 3)


def test_what_cannot_be_drawn_is_said(run_dir: Path, tmp_path: Path) -> None:
    cosmos("plot", run_dir, "-o", tmp_path / "one.doc").complains(2, "one.doc cannot be drawn")
    event_file.path_of(run_dir).unlink()
    cosmos("plot", run_dir).complains(2, "has no step to draw")
    cosmos("plot", tmp_path / "nowhere").complains(2, "nowhere does not exist")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_link_to_the_dashboard_for_a_program(run_dir: Path, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('of the current directory, which may be anybody's')")
    command = [sys.executable, "-P", "-m", "launcher.cli", "dashboard", str(run_dir), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, process_group=0, cwd=tmp_path, env=env
    ) as serving:
        assert serving.stdout is not None
        found = json.loads(serving.stdout.readline())
        (server,) = psutil.Process(serving.pid).children()
        serving.send_signal(number)  # not to what serves: that must end with it all the same
    assert serving.returncode == 0
    assert not server.is_running()
    assert found["runs"] == [str(run_dir)]
    assert found["link"].endswith(f"/#token={found['token']}")
    assert len(found["token"]) == 64
