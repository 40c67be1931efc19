"""Signals to every process of a job, against the table of docs/operations.md, which is read here.

python -m tests.chaos.signals               every row with every signal, in a few jobs
python -m tests.chaos.signals --only redis  rows whose process has this in its name
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from examples.quickstart.make_model import make_model
from launcher.processes.keeper import is_stopped
from tests.chaos.job import STUCK, Kill, StruckJob
from tests.chaos.plan import JobPlan, Strike
from tests.chaos.setting import ROOT, Setting
from tests.chaos.traces import Process, is_keeper, kill
from tests.support.waiting import PATIENCE

TABLE = ROOT / "docs" / "operations.md"
HEAD = "| process | signal | what happens | within | exit code | what is left |"
OUTCOMES = ("restarted", "leaves", "ignored", "continued", "the job ends", "the job waits")
PROGRAM = (sys.executable, "-m", "launcher.cli")
"""As users have it: what hangs is waited for as long as in a real job."""
LOOK_EVERY = 0.1
"""Seconds between looks at what has come of a signal: a look reads all of /proc."""
SETTLED = 1.0
"""Seconds after which a signal that does nothing would have done something."""
KEEPS_STOPPED = 3.0
"""Seconds for which a launcher is stopped, while its job goes on."""
COSTLY = ("leaves", "the job ends")


@dataclass(frozen=True, slots=True)
class Row:
    """One process and one signal. code: of the process, or of the launcher where the job ends; None: it goes on."""

    process: str
    number: signal.Signals
    outcome: str
    within: float
    code: int | None
    left: str

    def __str__(self) -> str:
        return f"{self.number.name} to {self.process}"


def rows(text: str | None = None) -> list[Row]:
    """The table, a row for each process and signal. Raises ValueError for one that cannot be tried."""
    text = TABLE.read_text() if text is None else text
    _, found, rest = text.partition(HEAD + "\n")
    if not found:
        raise ValueError(f"{TABLE} has no table with the head {HEAD}")
    read = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        processes, signals, happens, within, code, left = (cell.strip() for cell in line.strip("|").split("|"))
        marked = re.match(r"\*\*(.+?)\*\*", happens)
        if marked is None or marked[1] not in OUTCOMES:
            raise ValueError(f"what happens must begin with one of {OUTCOMES} in bold: {line}")
        for process in processes.split(", "):
            for name in signals.split(", "):
                number = signal.Signals[name]
                known = int(code) if code != "none" else None
                read.append(Row(process, number, marked[1], float(within.removesuffix(" s")), known, left))
    return read


def strike(row: Row, moment: str = "progress") -> SignalStrike:
    """A row as a strike of a job."""
    return SignalStrike("launcher", moment, 0.0, 0.0, 0.0, row=row)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SignalStrike(Strike):
    """A row of the table, and what comes of it is waited for."""

    row: Row | None = None


@dataclass(slots=True)
class Struck:
    """A process that has got its signal."""

    row: Row
    victim: Process
    worker: Process
    at: float
    clock: float
    before: int
    """How many there were of its kind."""


@dataclass
class SignalJob(StruckJob):
    """A job whose strikes are rows of the table; others are struck as ever."""

    command: Sequence[str] = PROGRAM
    struck: Struck | None = None
    tried: list[Row] = field(default_factory=list)
    restored: float = 0.0
    looked_at: float = 0.0

    def _launch(self, *arguments: str) -> None:
        """While strikes are left, rewards are slow, so that the job is not over before."""
        if not arguments:
            (self.folder / "slow").touch()
        super()._launch(*arguments)

    def _struck_all(self, strike: Strike) -> bool:
        """A strike is spent; the last one lets the job go on fast."""
        if strike is self.plan.strikes[-1]:
            (self.folder / "slow").unlink(missing_ok=True)
        return True

    def _strike(self, strike: Strike, now: float) -> bool:
        if not isinstance(strike, SignalStrike) or strike.row is None:
            return super()._strike(strike, now) and self._struck_all(strike)
        if now - self.looked_at < LOOK_EVERY:
            return False
        self.looked_at = now
        if self.struck is None:
            self._send(strike, strike.row, now)
            return False
        if not self._came_true(self.struck):
            if now - self.struck.at < self.struck.row.within + PATIENCE:
                return False
            self.errors.append(f"{self.struck.row}: not {self.struck.row.outcome}; {self._where()}")
        struck, self.struck = self.struck, None
        self.tried.append(struck.row)
        return self._struck_all(strike)

    def _is_over(self) -> bool:
        return super()._is_over() and (self.struck is None or self.struck.row.outcome != "the job ends")

    def _send(self, strike: SignalStrike, row: Row, now: float) -> None:
        last = max(self.kills[-1].at if self.kills else self.began, self.restored)
        if strike.moment == "progress" and self.watch.commit_after(last) is None:
            return
        if row.process == "launcher":
            launcher = self._launcher
            if launcher is None or launcher.poll() is not None:
                return
            victim = worker = Process(launcher.pid, os.getpid(), (), None)
            before = 1
            os.kill(launcher.pid, row.number)
        else:
            found = self._find(row.process.removeprefix("keeper of "))
            if strike.moment == "progress" and row.outcome == "leaves" and len(found) < 2:
                return self._restore(now)
            if not found:
                return
            before, worker = len(found), found[-1]
            victim = self._keeper_of(worker) if row.process.startswith("keeper of ") else worker
            if row.outcome == "leaves" and not _catches(worker.pid, signal.SIGTERM):
                return  # it is still starting
            if victim is None or not kill(victim, row.number):
                return
        status = self.watch.status
        self.struck = Struck(row, victim, worker, time.monotonic(), time.time(), before)
        hit = Kill(
            "launcher", str(row), strike.moment, self.struck.at, self.struck.at - self.began,
            status.step if status else 0, str(status.phase) if status else "starting",
        )  # fmt: skip
        self.kills.append(hit)
        self.say(hit)

    def _restore(self, now: float) -> None:
        """Start all replicas again by a resume: one that was asked to leave has left."""
        assert self._launcher is not None
        self._launcher.kill()
        self._launcher.wait(PATIENCE)
        self._launch("--resume")
        self.restored = time.monotonic() + 1.0

    def _find(self, name: str) -> list[Process]:
        alive = self.traces.alive()
        if name in ("policy", "other rank"):
            ranks = {"policy": ("0", ""), "other rank": ("1",)}[name]
            return [process for process in alive if process.role == "policy" and _rank(process.pid) in ranks]
        return [process for process in alive if process.role == name]

    def _keeper_of(self, worker: Process) -> Process | None:
        return next((p for p in self.traces.alive() if p.pid == worker.parent and is_keeper(p.argv)), None)

    # ---- what came of it ----------------------------------------------------------------------------------

    def _came_true(self, struck: Struck) -> bool:
        outcome, row = struck.row.outcome, struck.row
        may_end = row.process.endswith("data")  # when it is done
        if outcome == "the job ends":
            return self._ended(struck)
        if outcome == "the job waits":
            return self._waited(struck)
        if outcome == "ignored":
            there = {struck.victim.pid, struck.worker.pid} <= {process.pid for process in self.traces.alive()}
            if not there and not may_end:
                self.errors.append(f"{row}: it has ended")
            return not there or time.monotonic() > struck.at + SETTLED
        if outcome == "continued":
            alive = {process.pid for process in self.traces.alive()}
            return (struck.victim.pid in alive or may_end) and not is_stopped(struck.victim.pid)
        alive = self._find(row.process.removeprefix("keeper of "))
        pids = {process.pid for process in self.traces.alive()}
        gone = not {struck.victim.pid, struck.worker.pid} & pids
        wanted = struck.before if outcome == "restarted" else struck.before - 1
        if not gone or len(alive) != wanted:
            return False
        return self._has_ended_with(struck)

    def _has_ended_with(self, struck: Struck) -> bool:
        """Whether the launcher has noted the end with the code of the table; those that it keeps no note of have."""
        role = struck.worker.role
        if role in ("reward", "trackers", "engine"):
            return True
        name = "policy" if struck.row.process == "other rank" else str(role)
        try:
            ends = json.loads((self.run_dir / "launcher.json").read_text())["ends"]
        except (OSError, ValueError, KeyError):
            return False
        codes = [end["code"] for end in ends if end["process"].startswith(name) and end["at"] >= struck.clock]
        if codes and struck.row.code not in codes:
            self.errors.append(f"{struck.row}: exit code {codes}, and the table says {struck.row.code}")
        return bool(codes) or (name == "data" and struck.row.code == 0)

    def _waited(self, struck: Struck) -> bool:
        """The job goes on without its launcher for a while."""
        if time.monotonic() < struck.at + KEEPS_STOPPED or self.watch.commit_after(struck.at) is None:
            return False
        os.kill(struck.victim.pid, signal.SIGCONT)
        return True

    def _ended(self, struck: Struck) -> bool:
        assert self._launcher is not None
        if (code := self._launcher.poll()) is None:
            return False
        code = 128 - code if code < 0 else code
        if code != struck.row.code:
            self.errors.append(f"{struck.row}: exit code {code}, and the table says {struck.row.code}")
        left = self.traces.left_behind(self.run_dir) if code != 128 + signal.SIGKILL else []
        self.errors += [f"{struck.row}: {text}" for text in left]
        if code != 128 + signal.SIGKILL:
            said = (self.folder / "launcher.log").read_text()
            if f"stopping (by {struck.row.number.name})" not in said or "cosmos-launch --resume" not in said:
                self.errors.append(f"{struck.row}: the launcher does not say how it ended")
        self._launch("--resume")
        self.restored = time.monotonic() + 1.0
        return True


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process does something of its own with a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _rank(pid: int) -> str:
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((value[5:].decode() for value in values if value.startswith(b"RANK=")), "")


def jobs(chosen: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Which rows are tried in which job: most in one; trainers of several ranks, vLLM, and the preparation of data,
    which every job has once, in others.

    Those that end a job, or a replica, come last. They begin a start of the launcher, after which trackers, which
    wait longer after each end, are started again at once: so theirs come in between.
    """
    special = {
        name: [row for row in chosen if row.process.endswith(name)] for name in ("other rank", "engine", "data")
    }
    rest = [row for row in chosen if not row.process.endswith(tuple(special))]
    costly = [row for row in rest if row.outcome in COSTLY]
    trackers = [row for row in rest if row.process.endswith("trackers")]
    order = [row for row in rest if row not in (*costly, *trackers)]
    order += [row for pair in zip_longest(costly, trackers) for row in pair if row is not None]
    found = [("transformers", order), ("transformers", special["other rank"]), ("vllm", special["engine"])]
    found += [("transformers", [row]) for row in special["data"]]
    return [(kind, rows) for kind, rows in found if rows]


def run(kind: str, chosen: Sequence[Row], folder: Path, model: Path, say: Callable[[Kill], None]) -> SignalJob:
    """One job through its rows."""
    ranks = 2 if any(row.process == "other rank" for row in chosen) else 1
    strikes = tuple(strike(row, "start" if row.process.endswith("data") else "progress") for row in chosen)
    replicas = 2 if kind == "transformers" else 1  # vLLM takes long to start
    setting = Setting(engine=kind, rows=40 + 16 * len(chosen), epochs=1, save_freq=4, replicas=replicas)
    plan = JobPlan(1, ranks, strikes, policies=2 if kind == "transformers" else 1)
    job = SignalJob(plan, setting, folder, model, say, 10**6, stuck_after=2 * STUCK)
    job.errors = job.run().violations
    return job


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.signals", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose process has this in its name")
    parser.add_argument("--signal", default="", help="rows of this signal")
    parser.add_argument("--jobs", type=int, default=100, help="so many jobs at most")
    parser.add_argument("--folder", type=Path, help="keep the jobs in this new directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the job is ended, too
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a job would inherit what nohup ignores
    chosen = [row for row in rows() if options.only in row.process and row.number.name.endswith(options.signal)]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="signals-"))
    folder.mkdir(exist_ok=True)
    make_model(folder / "model", seed=1)
    begun, failed = time.monotonic(), 0

    def say(hit: Kill) -> None:
        _say(f"{time.monotonic() - begun:6.0f} s  {hit.target} ({hit.phase}, step {hit.step})")

    number, waiting = 0, jobs(chosen)
    while waiting and number < options.jobs:
        kind, part = waiting.pop(0)
        job = run(kind, part, folder / f"job-{number}", folder / "model", say)
        passed = f"{time.monotonic() - begun:6.0f} s  job {number}"
        _say(f"{passed}: {len(job.tried)} of {len(part)} signals tried")
        if rest := [row for row in part if row not in job.tried]:  # it was over before
            if job.tried:
                waiting.insert(0, (kind, rest))
            else:
                job.errors += [f"{row}: it could not be sent" for row in rest]
        for error in job.errors:
            _say(f"          VIOLATION {error}")
        failed += bool(job.errors)
        number += 1
    if failed:
        _say(f"kept: {folder}")
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
