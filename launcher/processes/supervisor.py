"""Starts the processes of a job, restarts those that die, and ends them: a thin driver around `launcher.restarts`.

Each replica has one task: spawn → wait → ask the observer and the policy → sleep or leave. Every process runs
below a keeper (`launcher.processes.keeper`) in a session of its own, so that Ctrl-C reaches the launcher alone and no
grandchild survives. When the job cannot go on, `ended` is set, once, with the reason and the culprit's last lines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from launcher.plan import nsight
from launcher.plan.placement import ProcessSpec, Replica
from launcher.processes import keeper
from launcher.processes.logs import tail
from launcher.restarts import EXIT_OK, SIGNALLED, Budget, EndJob, Left, Restart, Restarts, describe_exit
from schema.util.memory_kills import LOOK_EVERY, PROBABLY, RecentKills

log = logging.getLogger(__name__)

PEER_GRACE = 5.0
"""Seconds for the other ranks of a replica once one has died: they hang in a collective and have nothing to save."""
KILLED = SIGNALLED + signal.SIGKILL
"""Exit code of a process that was killed, by the kernel too."""
KEEPER_MARGIN = 3.0
"""Seconds that a keeper gets beyond what it grants its process."""

State = Literal["starting", "up", "waiting", "ended", "stopped"]


@dataclass(frozen=True, slots=True)
class Exit:
    """A replica that went down: its exit code, the process that was first, and that one's last lines."""

    replica: Replica
    process: str
    code: int
    lines: tuple[str, ...]
    log_file: Path
    pid: int = 0
    """Of the keeper of its first process."""
    hung: bool = False
    """Whether it was killed here because it did not answer."""
    out_of_memory: str = ""
    """How the kernel killed it, or a process of the job while it ran, for lack of memory; empty: it did not."""

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.hung:
            return "killed because it did not answer"
        if self.out_of_memory and self.code == KILLED:
            return self.out_of_memory
        how = describe_exit(self.code)
        # Of a machine that only counts, another process's kill says nothing of this end.
        if not self.out_of_memory or self.out_of_memory == PROBABLY:
            return how
        return f"{how}, after a process of the job was {self.out_of_memory}"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the job cannot go on, and who is to blame."""

    verdict: EndJob
    exit: Exit | None


@dataclass(frozen=True, slots=True)
class Situation:
    """What the restart policy must know of the job when a process has ended (see `Restarts.exited`)."""

    over: bool
    needed: bool
    counts: bool = True


class Observer(Protocol):
    """Gets the exits and knows the state of the job."""

    async def exited(self, exit_: Exit) -> Situation: ...

    def event(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """How processes are run. `environment` gives a process its whole environment, secrets included."""

    log_dir: Path
    lock_dir: Path
    grace: float
    budget: Budget
    environment: Callable[[ProcessSpec], Mapping[str, str]]
    profiles: Path = Path()
    """Where reports of profilers go."""


@dataclass(slots=True)
class Supervised:
    """One replica under care."""

    replica: Replica
    restarts: Restarts
    after: str = ""
    remove: str = ""
    state: State = "starting"
    stopping: bool = False
    hung: bool = False
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    last_exit: Exit | None = None
    since: float = 0.0
    """When its present processes were started, by the monotonic clock."""

    @property
    def alive(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self.processes.values() if process.returncode is None]


class Supervisor:
    """All processes of one job."""

    def __init__(self, setting: Setting, observer: Observer) -> None:
        self.setting, self.observer = setting, observer
        self.replicas: dict[str, Supervised] = {}
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def launch(self, replica: Replica, *, after: str = "", remove: str = "") -> Supervised:
        """Start a replica and keep it alive. `after`: role that must be gone before it ends without a launcher."""
        restarts = Restarts(replica.name, replica.role, self.setting.budget)
        supervised = Supervised(replica, restarts, after, remove)
        self.replicas[replica.name] = supervised
        supervised.task = asyncio.create_task(self._care(supervised), name=f"keep {replica.name}")
        supervised.task.add_done_callback(self._check_task)
        return supervised

    def running(self, names: Iterable[str] | None = None) -> list[Supervised]:
        """Replicas that are up or about to be."""
        wanted = self.replicas if names is None else names
        return [self.replicas[n] for n in wanted if n in self.replicas and not self.replicas[n].done.is_set()]

    def end(self, verdict: EndJob, exit_: Exit | None = None) -> None:
        """Say that the job cannot go on; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(Ending(verdict, exit_))

    async def wait(self, names: Iterable[str], timeout: float) -> bool:
        """Wait until replicas have left by themselves; False if some are still there after `timeout` seconds."""
        chosen = self.running(names)
        if chosen:
            await _wait_all(chosen, timeout)
        return not self.running(names)

    def kill(self, name: str) -> None:
        """Kill a replica that no longer answers; it is restarted like one that crashed."""
        supervised = self.replicas[name]
        supervised.hung = bool(supervised.alive)
        if not supervised.remove:
            self._signal(supervised, signal.SIGINT)
            return
        # Asked to kill it, its keeper would take it for the end and remove what the next start needs.
        for process in supervised.alive:
            _kill_all(keeper.descendants(process.pid))

    async def stop(self, names: Iterable[str], grace: float | None = None) -> None:
        """End replicas in order: SIGTERM, `grace` seconds (default: the setting's), then kill. None is left."""
        chosen = self.running(names)
        for supervised in chosen:
            supervised.stopping = True
            if not supervised.alive and supervised.task is not None:
                supervised.task.cancel()
        wait = self.setting.grace if grace is None else grace
        for number, seconds in (
            (signal.SIGTERM, wait + KEEPER_MARGIN),
            (signal.SIGINT, keeper.KILL_TIMEOUT + KEEPER_MARGIN),
            (signal.SIGKILL, KEEPER_MARGIN),
        ):
            chosen = [supervised for supervised in chosen if not supervised.done.is_set()]
            if not chosen:
                return
            for supervised in chosen:
                self._signal(supervised, number)
            await _wait_all(chosen, seconds)

    async def kill_all(self) -> None:
        """End everything at once."""
        for supervised in self.running():
            supervised.stopping = True
            self._signal(supervised, signal.SIGINT)
        await self.stop(list(self.replicas), grace=0.0)

    # ---- one replica --------------------------------------------------------------------------------------

    async def _care(self, supervised: Supervised) -> None:
        replica, restarts = supervised.replica, supervised.restarts
        try:
            while True:
                restarts.started(time.monotonic())
                exit_ = await self._run_once(supervised)
                supervised.last_exit = exit_
                if supervised.stopping:
                    return
                supervised.state, ended_at = "waiting", time.monotonic()
                situation = await self.observer.exited(exit_)
                verdict = restarts.exited(
                    ended_at,
                    exit_.code,
                    exit_.how,
                    over=situation.over or supervised.stopping,
                    needed=situation.needed,
                    counts=situation.counts,
                )
                if isinstance(verdict, EndJob):
                    return self.end(verdict, exit_)
                if isinstance(verdict, Left):
                    return
                await self._back_off(supervised, verdict, exit_)
        finally:
            supervised.state = "stopped" if supervised.stopping else "ended"
            supervised.done.set()
            log.debug("%s is %s", replica.name, supervised.state)

    async def _back_off(self, supervised: Supervised, verdict: Restart, exit_: Exit) -> None:
        name, delay = supervised.replica.name, f"in {verdict.delay:.1f} s"
        if verdict.attempt:
            self.observer.event(
                f"{name} ended ({verdict.reason}); restart {verdict.attempt} of {verdict.limit} {delay}; "
                f"its log: {exit_.log_file}"
            )
        elif verdict.delay:
            self.observer.event(f"{name}: {verdict.reason}; it is started again {delay}")
        await asyncio.sleep(verdict.delay)

    async def _run_once(self, supervised: Supervised) -> Exit:
        """Start all ranks and wait until the replica is down. One rank that fails takes the others with it."""
        replica = supervised.replica
        supervised.state, supervised.since, supervised.hung = "starting", time.monotonic(), False
        shared = _rendezvous() if replica.rendezvous else {}
        kills = RecentKills()
        try:
            for spec in replica.processes:
                supervised.processes[spec.name] = await self._spawn(supervised, spec, shared)
        except OSError:  # the ranks that were started would wait for this one, and would never end
            await self._end_peers(supervised)
            raise
        supervised.state = "up"
        if supervised.stopping:  # asked to stop between two spawns
            self._signal(supervised, signal.SIGTERM)
        culprit, code = replica.processes[0], EXIT_OK
        waits = {
            asyncio.create_task(supervised.processes[spec.name].wait()): spec for spec in replica.processes
        }
        try:
            while waits:
                done, _ = await asyncio.wait(waits, timeout=LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                kills.look()
                ended = [(waits.pop(task), task.result()) for task in done]
                failed = [(spec, status) for spec, status in ended if status != EXIT_OK]
                if failed and code == EXIT_OK:
                    culprit, code = failed[0]
                    await self._end_peers(supervised)
        finally:
            for task in waits:
                task.cancel()
        await _sweep(process for process in supervised.processes.values() if (process.returncode or 0) < 0)
        code = 128 - code if code < 0 else code
        log_file = self._log_path(culprit)
        lines = tuple(tail(log_file, since=supervised.offsets[culprit.name]))
        leader = supervised.processes[replica.processes[0].name]
        memory = kills.cause() if code != EXIT_OK else ""
        return Exit(replica, culprit.name, code, lines, log_file, leader.pid, supervised.hung, memory)

    async def _end_peers(self, supervised: Supervised) -> None:
        if not supervised.alive:
            return
        self._signal(supervised, signal.SIGTERM)
        waits = [asyncio.create_task(process.wait()) for process in supervised.alive]
        profiled = any(spec.profiled for spec in supervised.replica.processes)
        _, late = await asyncio.wait(waits, timeout=PEER_GRACE + (nsight.REPORT_SECONDS if profiled else 0.0))
        if late:
            self._signal(supervised, signal.SIGINT)
            await asyncio.wait(late, timeout=keeper.KILL_TIMEOUT + KEEPER_MARGIN)

    async def _spawn(
        self, supervised: Supervised, spec: ProcessSpec, shared: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        role = "workers" if spec.role not in ("redis", "controller") else str(spec.role)
        settings = keeper.Settings(
            parent=os.getpid(),
            grace=self.setting.grace,
            hold=str(self.setting.lock_dir / f"{role}.lock"),
            after=str(self.setting.lock_dir / f"{supervised.after}.lock") if supervised.after else "",
            remove=supervised.remove,
            under=nsight.command(self.setting.profiles, spec.name) if spec.profiled else (),
        )
        if spec.profiled:
            self.setting.profiles.mkdir(exist_ok=True)
            self.setting.profiles.chmod(0o700)  # a report may hold the environment, and so a token
        path = self._log_path(spec)
        with path.open("ab") as output:
            supervised.offsets[spec.name] = output.tell()
            return await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, settings.to_json(), *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.setting.environment(spec), **shared},
                start_new_session=True,
            )  # fmt: skip

    def _log_path(self, spec: ProcessSpec) -> Path:
        return self.setting.log_dir / f"{spec.name}.log"

    @staticmethod
    def _signal(supervised: Supervised, number: signal.Signals) -> None:
        for process in supervised.alive:
            try:
                if number == signal.SIGKILL:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
            except ProcessLookupError:
                continue

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A fault of the supervisor itself ends the job instead of leaving a replica without care."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("supervision failed", exc_info=error)
            self.end(EndJob(1, f"the launcher could not {task.get_name()}: {type(error).__name__}: {error}"))


async def _sweep(killed_keepers: Iterable[asyncio.subprocess.Process]) -> None:
    """Kill what a killed keeper could not: its process is killed by the kernel, the children of that one are not."""
    for process in killed_keepers:
        give_up = time.monotonic() + KEEPER_MARGIN
        while (left := keeper.left_behind(process.pid)) and time.monotonic() < give_up:
            _kill_all(left)
            await asyncio.sleep(0.01)


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


async def _wait_all(chosen: list[Supervised], seconds: float) -> None:
    waits = [asyncio.create_task(supervised.done.wait()) for supervised in chosen]
    _, late = await asyncio.wait(waits, timeout=seconds)
    for task in late:
        task.cancel()


def _rendezvous() -> dict[str, str]:
    """A fresh meeting point for the ranks of a replica: the old port may linger after a crash."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}


def free_port(host: str) -> int:
    """A port that is free now on `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
