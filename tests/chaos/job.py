"""One job from its start to the verdict: started as a user does, struck as planned, judged at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tests.chaos.judge import Evidence, judge, parse, together
from tests.chaos.plan import FOR_GOOD, LONGEST_STOP, JobPlan, Role, Strike
from tests.chaos.servers import NamedRedis, ObjectStore
from tests.chaos.setting import ROOT, Setting
from tests.chaos.traces import Traces, is_keeper, kill
from tests.chaos.watch import Watch
from tests.support.waiting import PATIENCE

COMMAND = (sys.executable, "-m", "tests.chaos.launch")
"""`cosmos-launch`, which sooner calls hung what does not answer."""
TICK = 0.02
END = 30.0
"""Seconds for what was killed to be gone."""
LOOK_EVERY = 2.0
NO_MOMENT = 6.0
"""Seconds after which a strike does not wait for a checkpoint or a validation any longer."""
NOBODY = 15.0
"""Seconds for which a strike that is due waits for somebody of its role; then the next one has its turn."""
STUCK = 180.0
"""Seconds without a committed step, a kill or an end after which the job counts as stuck."""


@dataclass(slots=True)
class Kill:
    """One signal that hit. Times are seconds: of `time.monotonic`, and from the kill to the next commit."""

    role: Role
    target: str
    moment: str
    at: float
    since_start: float
    step: int
    phase: str
    recovery: float | None = None


@dataclass(slots=True)
class Verdict:
    """How a job came through."""

    plan: JobPlan
    kills: list[Kill]
    violations: list[str]
    seconds: float
    rewinds: int
    dropped: int
    folder: Path


@dataclass
class StruckJob:
    """See the module's docstring. `say` gets a line per kill; `most` ends the strikes after so many hits."""

    plan: JobPlan
    setting: Setting
    folder: Path
    model: Path
    say: Callable[[Kill], None]
    most: int
    redis: NamedRedis | None = None
    store: ObjectStore | None = None
    stuck_after: float = STUCK
    command: Sequence[str] = COMMAND
    kills: list[Kill] = field(default_factory=list)
    due: dict[Strike, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def run(self) -> Verdict:
        """Never raises for what the job does; everything is in the verdict. Leaves no process behind."""
        self.folder.mkdir(parents=True)
        (self.folder / "tmp").mkdir()
        if self.store is not None:
            self.store.empty()
        self.config = self.setting.write(
            self.folder,
            self.model,
            seed=self.plan.seed,
            ranks=self.plan.ranks,
            policies=self.plan.policies,
            redis="" if self.redis is None else self.redis.keys,
            upload="" if self.store is None else self.store.keys,
        )
        self.run_dir = self.folder / "run"
        self.traces = Traces(self.folder)
        self.began = time.monotonic()
        self._revivals: list[tuple[float, Callable[[], None]]] = []
        self._launcher: subprocess.Popen[bytes] | None = None
        self._pause: float | None = None
        """Seconds after which a launcher that got a signal and has ended is followed by another."""
        self._launch()
        code: int | None = None
        try:
            with Watch(self.run_dir) as self.watch:
                code = self._until_over()
                self._note_recoveries()
            seconds = time.monotonic() - self.began
            return self._judge(code, seconds)
        finally:
            self._end_all()

    # ---- while it runs ------------------------------------------------------------------------------------

    def _until_over(self) -> int | None:
        """The launcher's exit code; None if the job had to be ended."""
        strikes = list(self.plan.strikes)
        looked = 0.0
        self._quiet_since = time.monotonic()
        seen_commits = 0
        while True:
            now = time.monotonic()
            if self._launcher is not None and (code := self._launcher.poll()) is not None and self._is_over():
                return code
            for due, revive in [item for item in self._revivals if item[0] <= now]:
                self._revivals.remove((due, revive))
                revive()
            if now - looked > LOOK_EVERY:
                self.traces.look()
                looked = now
            if strikes and len(self.kills) < self.most and self._strike(strikes[0], now):
                strikes.pop(0)
                self._quiet_since = now
            if len(self.watch.commits) > seen_commits:
                seen_commits, self._quiet_since = len(self.watch.commits), now
            if now - self._quiet_since > self.stuck_after:
                self.errors.append(f"stuck: nothing happened for {self.stuck_after:.0f} s; {self._where()}")
                return None
            time.sleep(TICK)

    def _is_over(self) -> bool:
        """Whether a launcher that has ended ends the job; one that got a signal is followed by another."""
        if self._pause is None or self._launcher is None or self._launcher.returncode == 0:
            return True
        self._revivals.append((time.monotonic() + self._pause, lambda: self._launch("--resume")))
        self._launcher = self._pause = None
        return False

    def _strike(self, strike: Strike, now: float) -> bool:
        """Strike if it is time and there is somebody to hit; whether the strike is spent."""
        since = self._moment(strike, now)
        if since is None or now < since + strike.delay:
            return False
        target = self._hit(strike)
        if target is None:
            return now - self.due.setdefault(strike, now) > NOBODY
        status = self.watch.status
        hit = Kill(
            strike.role,
            target,
            strike.moment,
            time.monotonic(),
            time.monotonic() - self.began,
            status.step if status else 0,
            str(status.phase) if status else "starting",
        )
        self.kills.append(hit)
        self.say(hit)
        return True

    def _moment(self, strike: Strike, now: float) -> float | None:
        """When the strike's moment came; None if it is still to come."""
        last = self.kills[-1].at if self.kills else self.began
        status = self.watch.status
        commits = [item for item in self.watch.commits if item[0] > last]
        if strike.moment == "start":
            return self.began
        if strike.moment == "after":
            return last
        if strike.moment == "finish":
            over = status is not None and status.step >= status.total_steps - 1
            return self._first("finish", now) if over else None
        if strike.moment == "progress":
            return commits[0][0] if commits else None
        if commits and now - commits[0][0] > NO_MOMENT:
            return commits[0][0]
        if strike.moment == "checkpoint":
            return now if any((self.run_dir / "checkpoints").glob(".*step-*")) else None
        rounds = [at for at, step in commits if step % self.setting.validation_freq == 0]
        return rounds[0] if rounds else None

    def _first(self, name: str, now: float) -> float:
        self._seen: dict[str, float] = getattr(self, "_seen", {})
        return self._seen.setdefault(name, now)

    def _hit(self, strike: Strike) -> str | None:
        """Kill one process of the role; what it was, or None if there was none."""
        if strike.role == "launcher":
            return self._hit_launcher(strike)
        if strike.role == "redis" and self.redis is not None:
            return self._hit_server(strike, self.redis)
        if strike.role == "store":
            return None if self.store is None else self._hit_server(strike, self.store)
        alive = self.traces.look()
        found = [process for process in alive if process.role == strike.role]
        if not found:
            return None
        victim = found[int(strike.choice * len(found))]
        name = str(strike.role)
        if strike.keeper:
            above = [p for p in alive if p.pid == victim.parent and is_keeper(p.argv)]
            victim, name = (above[0], f"keeper of {name}") if above else (victim, name)
        if not strike.stop:
            return f"{name} {victim.pid}{_with(strike)}" if kill(victim, strike.number) else None
        if not kill(victim, signal.SIGSTOP):
            return None
        return self._wake_later(strike, f"{name} {victim.pid}", lambda: kill(victim, signal.SIGCONT))

    def _wake_later(self, strike: Strike, target: str, wake: Callable[[], object]) -> str:
        """Let one that was stopped go on in time; what was hit."""
        if strike.stop == FOR_GOOD:
            return f"{target} (stopped)"
        self._revivals.append((time.monotonic() + strike.stop, lambda: wake() and None))
        return f"{target} (stopped {strike.stop:.0f} s)"

    def _hit_launcher(self, strike: Strike) -> str | None:
        launcher = self._launcher
        if launcher is None or launcher.poll() is not None:
            return None
        if strike.stop:
            launcher.send_signal(signal.SIGSTOP)
            return self._wake_later(strike, f"launcher {launcher.pid}", lambda: launcher.send_signal(signal.SIGCONT))
        launcher.send_signal(strike.number)
        if strike.number != signal.SIGKILL:  # it ends in order, and takes its time
            self._pause = strike.pause
            return f"launcher {launcher.pid}{_with(strike)}"
        launcher.wait(PATIENCE)
        self._launcher = None
        self._revivals.append((time.monotonic() + strike.pause, lambda: self._launch("--resume")))
        return f"launcher {launcher.pid}"

    def _hit_server(self, strike: Strike, server: NamedRedis | ObjectStore) -> str | None:
        pid = server.pid
        if pid is None:
            return None
        if strike.stop:  # nobody but an administrator would find one that stays so
            os.kill(pid, signal.SIGSTOP)
            strike = replace(strike, stop=min(strike.stop, LONGEST_STOP))
            return self._wake_later(strike, f"{strike.role} {pid}", lambda: server.wake(pid))
        server.kill()
        self._revivals.append((time.monotonic() + strike.pause, server.start))
        return f"{strike.role} {pid}"

    def _launch(self, *arguments: str) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("COSMOS_")}
        env["PYTHONPATH"] = str(ROOT)
        env |= {"TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for server in (self.redis, self.store):
            env |= {} if server is None else server.environment
        with (self.folder / "launcher.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                [*self.command, "--config", str(self.config), *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def _where(self) -> str:
        status = self.watch.status
        phase = "no controller was ever reached" if status is None else f"{status.phase} at step {status.step}"
        alive = sorted({process.role for process in self.traces.look() if process.role})
        return f"{phase}, alive: {', '.join(alive)}"

    # ---- the end ------------------------------------------------------------------------------------------

    def _note_recoveries(self) -> None:
        for item in self.kills:
            at = self.watch.commit_after(item.at)
            item.recovery = None if at is None else at - item.at

    def _judge(self, code: int | None, seconds: float) -> Verdict:
        if code is None:
            self._end_all()
        left = self.traces.left_behind(self.run_dir)
        summary = self._summary()
        logs = [*(self.run_dir / "logs").glob("policy-?.log"), *(self.run_dir / "logs").glob("policy-?-rank0.log")]
        each = [log.read_text(errors="replace").splitlines() for log in sorted(logs)]
        events, lives = parse(chain(*each)), []
        if self.plan.policies > 1:  # one that comes back says so, and the others go on
            lives = [parse(lines) for lines in each]
            events = together(each)
        evidence = Evidence(code, summary, events, left, self.errors + self._unfinished(), lives, self._answers())
        violations = judge(evidence, self.setting.shape)
        ledger = (summary or {}).get("ledger") or {}
        return Verdict(
            self.plan,
            self.kills,
            violations,
            seconds,
            self.watch.rewinds,
            sum(ledger.get("dropped", {}).values()),
            self.folder,
        )

    def _summary(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    def _answers(self) -> dict[int, list[str]]:
        """Which answers are in the file of each step."""
        return {
            int(path.stem.rpartition("-")[2]): [
                f"{line['group']}/{line['index']}" for line in map(json.loads, path.read_text().splitlines())
            ]
            for path in self.run_dir.parent.glob("answers/*/train/*.jsonl")
        }

    def _unfinished(self) -> list[str]:
        """What a finished run must hold, and does not."""
        found = []
        final = self.run_dir / "final"
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            if not (final / name).is_file():
                found.append(f"{final / name} is missing")
        checkpoints = self.run_dir / "checkpoints"
        kept = sorted(path.name for path in checkpoints.glob("step-*"))
        try:
            latest = (checkpoints / "latest").read_text().strip()
        except OSError:
            latest = ""
        if not kept or latest != kept[-1]:
            found.append(f"the newest checkpoint is not the one that `latest` names: {latest!r} of {kept}")
        return found + ([] if self.store is None else self.store.missing(self.run_dir))

    def _end_all(self) -> None:
        """Leave nobody: the launcher in order, then whoever is left."""
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGCONT)
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait(PATIENCE)
        give_up = time.monotonic() + END
        while (left := self.traces.look()) and time.monotonic() < give_up:  # one may start another meanwhile
            for process in left:
                kill(process)
            time.sleep(TICK)
        for server in (self.redis, self.store):
            if server is not None and server.pid is not None:
                server.wake(server.pid)
            if server is not None and server.pid is None:
                server.start()


def _with(strike: Strike) -> str:
    """Another signal than SIGKILL."""
    return "" if strike.number == signal.SIGKILL else f" ({strike.number.name})"
