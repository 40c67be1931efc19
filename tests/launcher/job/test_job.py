"""Whole jobs: launcher, keepers, Valkey and controller are real; the trainer commits steps without training.

Each row of the design's "when something dies" that a launcher can see, by kill -9 of the real process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.client import Client, ControllerError
from controller.client import calls as api
from launcher.plan.rundir import RunDir, read_json
from launcher.processes.keeper import descendants
from tests.launcher.cli import ROOT, cosmos
from tests.launcher.scripts import alive, until_gone
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow


class Driven:
    """A launcher that runs one job, and looks at its processes."""

    def __init__(self, run_dir: Path, script: dict[str, Any], steps: int) -> None:
        self.run_dir = run_dir
        self._output = run_dir.with_name(run_dir.name + ".out")
        command = [sys.executable, "-m", "tests.launcher.drive_job", run_dir, json.dumps(script), steps]
        with self._output.open("a") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def go_on(self) -> None:
        """Let a trainer that waits at its `hold_at` go on."""
        (self.run_dir / "go").touch()

    def family(self) -> list[int]:
        return descendants(self.process.pid)

    def pid_of(self, part: str) -> int:
        """The process (not its keeper) whose command line contains `part`."""
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid in self.family() if part in (line := cmdline(pid)) and "keeper.py" not in line]
            return bool(found)

        until(look, f"a process {part}")
        return found[0]

    def step(self) -> int:
        """Committed steps; -1 while the controller is not up."""
        address, token = read_json(self.run_dir / "controller.json"), RunDir(self.run_dir).read_token()
        if address is None or token is None:
            return -1
        try:
            with Client(address["url"], token) as client:
                return client.send(api.job()).step
        except ControllerError:
            return -1

    def reaches(self, step: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.output()
            return self.step() >= step

        until(reached, f"step {step}")

    def event_log(self) -> dict[str, Any]:
        """launcher.json: written once a round, so a moment behind the ledger."""
        return read_json(self.run_dir / "launcher.json") or {}

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


Drive = Callable[..., Driven]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """Starts jobs, and ends whatever a failed test has left."""
    started: list[Driven] = []

    def start(steps: int = 10, **script: Any) -> Driven:
        started.append(Driven(tmp_path / "run", script, steps))
        return started[-1]

    yield start
    for job in started:
        family = job.family()
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(PATIENCE)
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def steps_of(summary: dict[str, Any]) -> list[int]:
    return [record["step"] for record in summary["steps"]]


def test_a_job_runs_to_its_end_and_writes_no_secret(drive: Drive):
    job = drive(10)
    assert job.wait() == 0, job.output()
    summary = job.summary()
    assert summary["outcome"] == "finished"
    assert summary["status"]["phase"] == "finished"
    assert steps_of(summary) == list(range(10))
    assert set(summary["restarts"].values()) == {0}
    assert "phase=finished step=10/10" in job.output()
    assert "steps     10 of 10" in job.output()
    assert {path.name for path in (job.run_dir / "logs").iterdir()} == {
        "controller.log", "launcher.log", "policy-0.log", "redis.log",
    }  # fmt: skip
    tokens = [path.read_bytes() for path in (job.run_dir / ".tokens").iterdir()]
    assert len(tokens) == 2
    for path in job.run_dir.rglob("*"):
        if path.is_file() and path.parent.name != ".tokens":
            assert not any(token in path.read_bytes() for token in tokens), path


def test_a_reader_that_goes_away_does_not_end_the_job(tmp_path: Path):
    """`cosmos-launch … | head -1`"""
    command = [sys.executable, "-m", "tests.launcher.drive_job", str(tmp_path / "run"), "{}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"
    assert "finished" in (tmp_path / "run" / "logs" / "launcher.log").read_text()


def test_a_trainer_that_is_killed_or_leaves_too_early_is_restarted(drive: Drive):
    job = drive(10, die_at=3, code=-9, hold_at=5)
    job.reaches(5)
    os.kill(job.pid_of("scripted_policy"), signal.SIGTERM)
    job.go_on()
    assert job.wait() == 0, job.output()
    assert steps_of(job.summary()) == list(range(10))
    assert job.summary()["restarts"]["policy-0"] == 2
    assert "killed by SIGKILL" in job.output()
    assert "still needs it" in job.output()
    assert "policy-0" in (job.run_dir / "logs" / "controller.log").read_text(), "it was notified at once"


def test_a_killed_controller_and_redis_come_back_with_everything(drive: Drive):
    job = drive(100, hold_at=5)
    for part in ("-m controller", "valkey-server"):
        job.reaches(5)
        victim = job.pid_of(part)
        os.kill(victim, signal.SIGKILL)
        until_gone([victim])
    job.go_on()
    assert job.wait() == 0, job.output()
    summary = job.summary()
    assert steps_of(summary) == list(range(100)), "each step once, none lost"
    assert sum(summary["restarts"].values()) == 2


def test_a_used_up_budget_ends_the_job_with_the_culprits_last_lines(drive: Drive):
    job = drive(10, die_at=0, code=7, every_life=True)
    assert job.wait() == 1, job.output()
    output, summary = job.output(), job.summary()
    assert "failed: policy-0 ended (exit code 7) and its restarts are used up (launcher.max_restarts = 2)" in output
    assert "policy-0.log" in output
    assert "│ dying at step 0" in output
    assert summary["outcome"] == "failed"
    assert summary["status"]["phase"] == "failed"
    assert summary["restarts"]["policy-0"] == 2


def test_an_end_that_no_restart_can_help(drive: Drive):
    job = drive(10, die_at=2, code=2)
    assert job.wait() == 2, job.output()
    assert "configuration" in job.output()
    assert job.summary()["restarts"]["policy-0"] == 0


def test_ctrl_c_ends_in_order_and_under_nohup_the_end_of_the_terminal_does_not(drive: Drive):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as nohup does it
    try:
        job = drive(20_000, pause=0.05)
    finally:
        signal.signal(signal.SIGHUP, before)
    job.reaches(1)
    job.process.send_signal(signal.SIGHUP)
    job.reaches(job.step() + 5)
    family = job.family()
    argv = cmdline(job.pid_of("valkey-server")).split()
    socket = Path(next(part.removeprefix("unixsocket:") for part in argv if part.endswith("redis.sock")))
    assert socket.exists()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output()
    assert not any(alive(pid) for pid in family)
    assert "stopping (by SIGINT)" in job.output()
    summary = job.summary()
    assert summary["outcome"] == "stopped"
    assert summary["status"]["phase"] == "stopped"
    assert not socket.parent.exists(), "the private directory of Valkey's socket"


def test_a_ctrl_c_while_the_launcher_is_still_loading_counts(drive: Drive):
    job = drive(20_000, early=[signal.SIGINT])
    assert job.wait() == 130, job.output()
    assert "stopping (by SIGINT)" in job.output()
    assert job.summary()["outcome"] == "stopped"


def test_a_stopped_and_a_failed_run_go_on(drive: Drive):
    stopped = drive(40, pause=0.02, hold_at=3)
    stopped.reaches(3)
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait() == 130, stopped.output()
    (stopped.run_dir / "first_life").unlink()
    failed = drive(40, pause=0.02, die_at=30, code=4)
    assert failed.wait() == 1, failed.output()
    assert "going on after" in failed.output()
    assert failed.summary()["status"]["phase"] == "failed"
    finished = drive(40, pause=0.02)
    assert finished.wait() == 0, finished.output()
    assert steps_of(finished.summary()) == list(range(40))
    again = drive(40)
    assert again.wait() == 0, again.output()
    assert steps_of(again.summary()) == list(range(40)), "a finished run stays finished"


def test_a_second_ctrl_c_kills_at_once(drive: Drive):
    job = drive(hold_at=1, stubborn=True)
    job.reaches(1)
    family = job.family()
    job.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in job.output(), "the first one was heard")
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output()
    assert "killing all processes" in job.output()
    assert not any(alive(pid) for pid in family)


def test_what_ignores_the_end_is_killed_after_its_time(drive: Drive):
    job = drive(hold_at=1, stubborn=True, shutdown_timeout=1.0)
    job.reaches(1)
    family = job.family()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.output()
    assert not any(alive(pid) for pid in family)


def test_kill_minus_9_of_the_launcher_leaves_no_orphan_and_the_run_goes_on(drive: Drive):
    job = drive(20, hold_at=5)
    job.reaches(5)
    family = job.family()
    assert len(family) >= 6, "three processes and their keepers"
    job.process.kill()
    job.wait()
    until_gone(family)
    cosmos("status", job.run_dir).says(1, "was killed", "alive until")  # dead, and without a summary
    again = drive(20)
    assert again.wait() == 0, again.output()
    assert steps_of(again.summary()) == list(range(20)), "Redis had the steps of the first start"


def test_everything_that_is_asked_from_another_terminal(drive: Drive):
    """One job whose trainer dies once: status, a wrong token, pause, checkpoint, drain, stop."""
    job = drive(20_000, pause=0.05, die_at=2, code=7)
    job.reaches(4)
    until(lambda: job.event_log().get("stage") == "training", "the stage in launcher.json")

    def reborn() -> bool:
        known = job.event_log()["processes"]["policy-0"]
        return bool(known["restarts"] == 1 and known["state"] == "up")

    until(reborn, "its second life")
    found = json.loads(cosmos("status", job.run_dir, "--json").stdout)
    assert (found["alive"], found["state"], found["status"]["phase"]) == (True, "running", "training")
    assert found["launcher"]["pid"] == job.process.pid
    assert found["launcher"]["processes"]["policy-0"] == {
        "role": "policy", "state": "up", "restarts": 1, "in_a_row": 1, "limit": 2,
    }  # fmt: skip
    (end,) = found["launcher"]["ends"]
    assert (end["process"], end["code"], end["lines"][-1]) == ("policy-0", 7, "dying at step 2")
    cosmos("status", job.run_dir).says(
        0, "phase=training", "policy-0 (pid ", "): live", "policy-0 1 (1 of 2 in a row)",
        "policy-0: exit code 7; its log: ", "│ dying at step 2",
    )  # fmt: skip

    wrong = cosmos("status", found["url"], COSMOS_TOKEN="wrong")
    wrong.complains(2, "does not know this token, which was not sent", "COSMOS_TOKEN")

    # a supervised trainer reads its own data
    cosmos("pause", job.run_dir).complains(1, "stop it and resume later")
    job.process.send_signal(signal.SIGUSR1)
    until(lambda: "SIGUSR1: a checkpoint is saved" in job.output(), "the answer")
    cosmos("checkpoint", job.run_dir).says(0, "a checkpoint is saved")
    assert "unknown rollout replica 'x'" in cosmos("drain", "x", job.run_dir).stderr
    assert job.process.poll() is None

    family = job.family()
    cosmos("stop", job.run_dir, "--wait", str(PATIENCE)).says(0, "have left")
    assert not any(alive(pid) for pid in family if pid != job.process.pid)
    assert job.wait() == 130, job.output()
    assert "by `cosmos-launch stop`" in job.output()
    cosmos("status", job.run_dir).says(0, "outcome: stopped")


def test_stop_without_a_controller_signals_the_launcher(drive: Drive):
    """The controller hangs: it neither answers nor ends."""
    job = drive(20_000, pause=0.05, shutdown_timeout=PATIENCE)
    job.reaches(2)
    os.kill(job.pid_of("-m controller"), signal.SIGSTOP)
    address = job.run_dir / "controller.json"
    address.write_text(json.dumps({"url": "http://127.0.0.1:9"}))
    cosmos("status", job.run_dir).says(0, "does not answer")
    cosmos("stop", job.run_dir).says(0, "was signalled to stop")
    until(lambda: job.event_log().get("ending"), "the launcher to end the job")
    cosmos("status", job.run_dir).says(0, "is ending: stopped: by SIGINT")
    cosmos("stop", job.run_dir).says(0, "it is ending already")
    assert "killing" not in job.output(), "a second Ctrl-C would have killed what ends in order"
    cosmos("stop", job.run_dir, "--now").says(0)
    assert job.wait() == 130
    assert not any(alive(pid) for pid in job.family())


def test_a_hung_redis_is_shown_and_restarted(drive: Drive):
    """SIGSTOP: it takes connections and answers nobody."""
    job = drive(10, hold_at=4, look_every=0.5)
    job.reaches(4)
    hung = job.pid_of("valkey-server")
    os.kill(hung, signal.SIGSTOP)
    until(lambda: job.event_log().get("redis") == "hung", "the launcher's notice")
    cosmos("status", job.run_dir).says(0, "redis: hung", "the launcher restarts Redis")
    until_gone([hung])
    until(lambda: "redis answers again" in job.output(), "another Redis")
    job.go_on()
    assert job.wait() == 0, job.output()
    assert "redis=hung" in job.output()
    assert "unreachable" not in job.output(), "the controller answers all the while"
    assert job.summary()["restarts"]["redis"] == 1
    assert steps_of(job.summary()) == list(range(10))


def test_what_a_killed_launcher_leaves_can_be_ended(drive: Drive):
    job = drive(hold_at=2, stubborn=True)
    job.reaches(2)
    family = job.family()
    job.process.kill()
    job.wait()
    cosmos("status", job.run_dir).says(1, "its processes are leaving")
    assert "its launcher is gone already" in cosmos("stop", job.run_dir).stdout
    cosmos("stop", job.run_dir, "--now").says(0, "killed")
    assert not any(alive(pid) for pid in family)
    assert cosmos("stop", job.run_dir).returncode == 1, "nothing is left to stop"
