"""The keeper with real processes: what dies when, and in which order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.plan import nsight
from launcher.processes import keeper
from launcher.processes.keeper import KeeperSettings
from tests.launcher.scripts import ON_TERM, PYTHON, STUBBORN, WITH_GRANDCHILD, alive, pids, until_gone
from tests.support.nsys import with_nsys
from tests.support.waiting import PATIENCE, until

KEEPER = (sys.executable, "-I", "-S", keeper.__file__)


def keep(script: str, *, out: bool = False, **settings: object) -> subprocess.Popen[str]:
    values = {"parent": os.getpid(), "grace": PATIENCE, **settings}
    argv = [*KEEPER, KeeperSettings(**values).to_json(), *PYTHON, script]  # type: ignore[arg-type]
    stdout = subprocess.PIPE if out else None
    return subprocess.Popen(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("code", [0, 1, 2, 4, 77])
def test_the_exit_code_is_the_workers(code: int):
    assert keep(f"raise SystemExit({code})").wait(PATIENCE) == code


def test_a_signal_becomes_128_plus_its_number():
    assert keep("import os; os.kill(os.getpid(), 11)").wait(PATIENCE) == 128 + signal.SIGSEGV


def test_a_missing_program_is_named():
    settings = KeeperSettings(parent=os.getpid(), grace=1.0).to_json()
    run = subprocess.run(
        [*KEEPER, settings, "/no/such/program"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.returncode == 127
    assert "/no/such/program: No such file" in run.stderr


def test_a_worker_has_default_handlers_whatever_the_parent_ignores():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        process = keep("print([line for line in open('/proc/self/status') if 'SigIgn' in line])", out=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ignored = int(process.communicate(timeout=PATIENCE)[0].split("\\t")[1].split("\\n")[0], 16)
    assert not [number for number in numbers if ignored >> (number - 1) & 1]


def test_a_worker_that_does_not_leave_is_killed_after_the_grace(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep(STUBBORN.format(ready=str(ready)), grace=0.2)
    (worker,) = pids(ready)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not alive(worker)
    assert "no orderly end within 0.2 s" in process.stderr.read()  # type: ignore[union-attr]


def test_sigint_kills_the_whole_tree_at_once(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep(WITH_GRANDCHILD.format(ready=str(ready), then="time.sleep(600)"), grace=600.0)
    worker, grandchild = pids(ready)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not alive(worker)
    assert not alive(grandchild)


def test_what_a_worker_leaves_behind_is_ended(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep(WITH_GRANDCHILD.format(ready=str(ready), then="raise SystemExit(3)"))
    _, grandchild = pids(ready)
    assert process.wait(PATIENCE) == 3
    assert not alive(grandchild)


def test_a_killed_keeper_takes_its_worker_along_and_its_orphans_can_be_found(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep(WITH_GRANDCHILD.format(ready=str(ready), then="time.sleep(600)"))
    worker, grandchild = pids(ready)
    process.kill()
    process.wait(PATIENCE)
    until_gone([worker])  # with its keeper
    assert alive(grandchild), "it has a session of its own and got no signal"
    assert keeper.left_behind(process.pid) == [grandchild]
    os.kill(grandchild, signal.SIGKILL)
    until_gone([grandchild])


PARENT = """
import json, os, subprocess, sys, time
keepers = []
for settings, *argv in json.loads(sys.argv[1]):
    settings["parent"] = os.getpid()
    command = [sys.executable, "-I", "-S", {keeper!r}, json.dumps(settings), *argv]
    keepers.append(subprocess.Popen(command, start_new_session=True))
open({ready!r}, "w").write(" ".join(str(process.pid) for process in keepers))
time.sleep(600)
"""


def start_parent(tmp_path: Path, commands: list[list[object]]) -> subprocess.Popen[bytes]:
    import json

    script = PARENT.format(keeper=keeper.__file__, ready=str(tmp_path / "parent"))
    return subprocess.Popen([*PYTHON, script, json.dumps(commands)])


def test_when_the_launcher_is_killed_all_leave_in_order(tmp_path: Path):
    """Workers first, in any order, then the controller, then Redis: each holds its lock until it has left."""
    order = tmp_path / "order"

    def command(name: str, pause: float, **locks: str) -> list[object]:
        body = f"time.sleep({pause}); open({str(order)!r}, 'a').write({name + ' '!r})"
        script = ON_TERM.format(ready=str(tmp_path / name), body=body)
        paths = {key: str(tmp_path / f"{value}.lock") for key, value in locks.items()}
        return [{"parent": 0, "grace": PATIENCE, **paths}, *PYTHON, script]

    parent = start_parent(
        tmp_path,
        [
            command("redis", 0.0, hold="redis", after="controller"),
            command("controller", 0.1, hold="controller", after="workers"),
            command("slow", 0.5, hold="workers"),
            command("quick", 0.2, hold="workers"),
        ],
    )
    keepers = pids(tmp_path / "parent")
    workers = [pids(tmp_path / name)[0] for name in ("redis", "controller", "slow", "quick")]
    parent.kill()
    parent.wait(PATIENCE)
    until_gone(keepers + workers)
    left = order.read_text().split()
    assert (sorted(left[:2]), left[2:]) == (["quick", "slow"], ["controller", "redis"])


def test_when_the_launcher_is_killed_the_stubborn_are_killed(tmp_path: Path):
    script = STUBBORN.format(ready=str(tmp_path / "worker"))
    parent = start_parent(tmp_path, [[{"parent": 0, "grace": 0.2}, *PYTHON, script]])
    keepers, workers = pids(tmp_path / "parent"), pids(tmp_path / "worker")
    parent.kill()
    parent.wait(PATIENCE)
    until_gone(keepers + workers)


def test_a_keeper_whose_launcher_is_gone_already_starts_nothing(tmp_path: Path):
    process = keep(f"open({str(tmp_path / 'started')!r}, 'w')", parent=1_234_567)
    assert process.wait(PATIENCE) == 0
    assert not (tmp_path / "started").exists()


def test_the_worker_knows_its_keeper():
    script = "import os; raise SystemExit(int(os.environ['COSMOS_PARENT_PID']) != os.getppid())"
    assert keep(script).wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_private_directory_is_the_launchers_while_that_lives(tmp_path: Path, number: signal.Signals):
    private, ready = tmp_path / "private", tmp_path / "ready"
    private.mkdir()
    (private / "socket").touch()
    process = keep(ON_TERM.format(ready=str(ready), body="pass"), remove=str(private))
    pids(ready)
    process.send_signal(number)
    process.wait(PATIENCE)
    assert (private / "socket").exists(), "the next start of the process needs it"
    script = ON_TERM.format(ready=str(tmp_path / "again"), body="pass")
    parent = start_parent(tmp_path, [[{"parent": 0, "grace": PATIENCE, "remove": str(private)}, *PYTHON, script]])
    keepers = pids(tmp_path / "parent")
    pids(tmp_path / "again")
    parent.kill()
    parent.wait(PATIENCE)
    until_gone(keepers)
    assert not private.exists()


def test_what_is_stopped_is_continued_but_for_sessions_of_their_own(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep(WITH_GRANDCHILD.format(ready=str(ready), then="time.sleep(600)"), stopped=0.4)
    worker, grandchild = pids(ready)
    for pid in (grandchild, worker):  # the grandchild has a session of its own
        os.kill(pid, signal.SIGSTOP)
    until(lambda: f"process {worker} was stopped" in process.stderr.readline(), "the note")  # type: ignore[union-attr]
    until(lambda: not keeper.is_stopped(worker), "it goes on")
    assert keeper.is_stopped(grandchild)
    os.kill(worker, signal.SIGSTOP)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM, "a stopped one gets the signal at once"
    assert not alive(grandchild)


# ---- under a profiler ---------------------------------------------------------------------------------------------


def keep_under(tmp_path: Path, script: str, **settings: object) -> subprocess.Popen[str]:
    """A worker below the stand-in for Nsight Systems, as the supervisor has it started."""
    os.environ["PATH"] = with_nsys(tmp_path / "bin")
    return keep(script, under=nsight.command(tmp_path, "worker"), **settings)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # put back afterwards


WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from schema.util.host import descends_from
above = int(os.environ["COSMOS_PARENT_PID"])
assert os.getppid() != above and descends_from(above) and not descends_from(1)
give_up = time.monotonic() + 300
while time.monotonic() < give_up and descends_from(above):
    if not os.path.exists({ready!r}):
        open({ready!r} + ".tmp", "w").write(str(os.getpid()))
        os.rename({ready!r} + ".tmp", {ready!r})
    time.sleep(0.02)
open({left!r}, "w")
"""


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(4)", 4), ("import os; os.abort()", 134)])
def test_under_a_profiler_the_exit_code_is_the_workers_and_no_report_is_overwritten(
    tmp_path: Path, script: str, code: int
):
    for number in (1, 2):
        assert keep_under(tmp_path, script).wait(PATIENCE) == code
        report = tmp_path / f"nsys-worker-{number}.nsys-rep"
        assert "--trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none" in report.read_text()
        assert report.read_text().endswith(f"{PYTHON[0]} -I -S -c {script}")


@pytest.mark.usefixtures("path")
def test_under_a_profiler_sigterm_is_the_workers_and_the_report_is_written(tmp_path: Path):
    ready, left = tmp_path / "ready", tmp_path / "left"
    process = keep_under(tmp_path, ON_TERM.format(ready=str(ready), body=f"open({str(left)!r}, 'w')"))
    pids(ready)
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert left.exists()
    assert (tmp_path / "nsys-worker-1.nsys-rep").exists()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("at", "point"), [("start", "starting"), ("report", "writing")])
def test_under_a_profiler_sigterm_waits_for_the_worker_and_never_ends_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, point: str
):
    """It comes before the profiler has started the worker, or after that has ended by itself."""
    monkeypatch.setenv("NSYS_GATE", str(tmp_path / "gate"))
    monkeypatch.setenv("NSYS_GATE_AT", at)
    script = "raise SystemExit(5)" if at == "report" else "import time; time.sleep(600)"
    process = keep_under(tmp_path, script)
    until((tmp_path / point).exists, "the point")
    process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    (tmp_path / "gate").touch()
    assert process.wait(PATIENCE) == (5 if at == "report" else 128 + signal.SIGTERM)
    assert (tmp_path / "nsys-worker-1.nsys-rep").exists()


@pytest.mark.usefixtures("path")
def test_under_a_profiler_a_worker_leaves_when_its_keeper_is_killed(tmp_path: Path):
    ready, left = tmp_path / "ready", tmp_path / "left"
    process = keep_under(
        tmp_path, WORKER.format(root=str(Path(__file__).parents[3]), ready=str(ready), left=str(left))
    )
    (worker,) = pids(ready)
    process.kill()
    process.wait(PATIENCE)
    until_gone([worker])
    assert left.exists(), "by itself"


@pytest.mark.usefixtures("path")
def test_under_a_profiler_the_whole_tree_is_killed(tmp_path: Path):
    ready = tmp_path / "ready"
    process = keep_under(tmp_path, STUBBORN.format(ready=str(ready)), grace=0.2)
    (worker,) = pids(ready)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    until_gone([worker])
