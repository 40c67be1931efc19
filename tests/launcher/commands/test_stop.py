"""Signals reach the launcher of a run and its keepers, and nobody who was given their process id later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.commands.stop import signal_keepers, signal_launcher
from launcher.errors import LaunchError
from launcher.plan.rundir import RunDir
from tests.support.waiting import PATIENCE, until

HOLDS = """
import sys, time
from pathlib import Path
from launcher.plan.rundir import RunDir
RunDir(Path(sys.argv[1])).lock()
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make()
    return run


@pytest.fixture
def holder(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run.path)]) as process:
        until(lambda: run.holder() is not None, "the lock")
        yield process
        process.kill()


def test_the_holder_of_the_lock_is_known_as_long_as_it_lives(run: RunDir, holder: subprocess.Popen[bytes]):
    found = run.holder()
    assert found is not None
    assert (found.pid, found.is_here) == (holder.pid, True)
    os.kill(holder.pid, signal.SIGSTOP)
    assert signal_launcher(run, found, signal.SIGTERM)
    assert holder.wait(PATIENCE) == -signal.SIGTERM
    assert run.holder() is None, "the kernel let go of the lock"
    assert not signal_launcher(run, found, signal.SIGTERM)


def test_a_process_that_got_the_launchers_id_is_left_alone(run: RunDir):
    """The file of a killed launcher names this very process: nothing holds the lock."""
    run.lock()
    holder = run.holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    run.unlock()
    (run.locks / "launcher.lock").write_text(json.dumps({"pid": os.getpid(), "host": holder.host, "since": 0.0}))
    assert run.holder() is None
    assert not signal_launcher(run, holder, signal.SIGKILL), "or this test is dead"


def test_a_process_that_another_one_names_is_left_alone(run: RunDir, holder: subprocess.Popen[bytes]):
    """A process that holds the lock can write any number into the file; only its own is signalled."""
    named = {**json.loads((run.locks / "launcher.lock").read_text()), "pid": os.getpid()}
    (run.locks / "launcher.lock").write_text(json.dumps(named))
    found = run.holder()
    assert found is not None
    with pytest.raises(LaunchError, match=f"names process {os.getpid()}, which does not hold it"):
        signal_launcher(run, found, signal.SIGKILL)
    assert holder.poll() is None


def test_a_later_launcher_is_not_the_one_that_was_meant(run: RunDir, holder: subprocess.Popen[bytes]):
    now = run.holder()
    assert now is not None
    assert not signal_launcher(run, replace(now, since=now.since - 100.0), signal.SIGKILL)
    assert holder.poll() is None


def test_only_keepers_of_this_run_are_signalled(run: RunDir, tmp_path: Path):
    other = RunDir(tmp_path / "other")
    other.make()
    script = tmp_path / "keeper.py"
    script.write_text(
        "import json, sys, time; held = sys.argv[2:] or open(json.loads(sys.argv[1])['hold'], 'w'); time.sleep(600)"
    )
    keepers = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps({"hold": str(where.locks / "workers.lock")}), *claims]
        )
        for where, claims in ((run, []), (other, []), (run, ["and does not hold it"]))
    ]
    try:
        until(lambda: signal_keepers(run, signal.SIGINT) == 1, "the keeper's command line")
        assert keepers[0].wait(PATIENCE) != 0
        assert [keeper.poll() for keeper in keepers[1:]] == [None, None]
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait(PATIENCE)
