"""Starts the processes of a job, restarts those that die, and ends them: a thin driver around `launcher.restarts`.

Each replica has one task: spawn → wait → ask the observer and the policy → sleep or leave. Where its processes run
is the business of their hosts (`launcher.processes.host`), by the `node` of each. When the job cannot go on, `ended`
is set, once, with the reason and the culprit's last lines.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from launcher.plan import nsight
from launcher.plan.addresses import free_port
from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.plan.rundir import RunDir
from launcher.processes import keeper
from launcher.processes.host import (
    KEEPER_MARGIN,
    Folders,
    Host,
    HostLostError,
    LocalHost,
    Process,
    ProcessEnd,
    ProcessOrder,
    escalation,
)
from launcher.restarts import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNLIKE,
    SIGNALLED,
    EndJob,
    Left,
    Restart,
    RestartBudget,
    Restarts,
    Role,
    describe_exit,
)
from schema.config import Config
from schema.util.memory_kills import PROBABLY

log = logging.getLogger(__name__)

PEER_GRACE = 5.0
"""Enough for ranks whose peer has died: they hang in a collective and have nothing to save."""
KILLED = SIGNALLED + signal.SIGKILL
"""Exit code of a process that was killed, by the kernel too."""
LOST = SIGNALLED + signal.SIGHUP
"""Exit code that stands for a process whose machine is gone: killed from outside."""

State = Literal["starting", "up", "waiting", "ended", "stopped"]


@dataclass(frozen=True, slots=True)
class Exit:
    """A replica that went down: its exit code, the process that was first, and that one's last lines."""

    replica: PlacedReplica
    process: str
    code: int
    lines: tuple[str, ...]
    log_file: Path
    pid: int = 0
    """The id of the keeper of its first process."""
    hung: bool = False
    """Whether it was killed here because it did not answer."""
    out_of_memory: str = ""
    """See `ProcessEnd`."""
    lost: str = ""
    """See `ProcessEnd`."""

    @property
    def how(self) -> str:
        """How it ended, in words."""
        if self.lost:
            return self.lost
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
    """The state of the job that the restart policy needs when a process has ended (see `Restarts.exited`)."""

    over: bool
    needed: bool
    counts: bool = True


class Observer(Protocol):
    """Takes the exits and has the state of the job."""

    async def exited(self, exit_: Exit) -> Situation: ...

    def event(self, text: str) -> None: ...


ONCE = Situation(over=True, needed=False)
"""The situation of a process that is not started again, however it ends."""


@dataclass(frozen=True, slots=True)
class Always:
    """Observer that answers every exit with the same situation. say: gets each event."""

    situation: Situation
    say: Callable[[str], None] = lambda text: None

    async def exited(self, exit_: Exit) -> Situation:
        return self.situation

    def event(self, text: str) -> None:
        self.say(text)


ELASTIC = (Role.POLICY, Role.ROLLOUT)
"""Roles whose replicas go on without one of theirs, if there are others."""


def _loopback() -> dict[str, str]:
    """A fresh meeting point for ranks of this machine: the old port may linger after a crash."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}


@dataclass(frozen=True, slots=True)
class Setting:
    """How processes are run."""

    folders: Folders
    grace: float
    budget: RestartBudget
    environment: Callable[[ProcessSpec], Mapping[str, str]]
    """Gives a process of this machine its whole environment, secrets included."""
    hosts: Mapping[int, Host] = field(default_factory=dict)
    """The other machines, by the number of the node."""
    rendezvous: Callable[[], Mapping[str, str]] = _loopback
    """Where the ranks of a replica meet at one start of it: variables for each."""
    peer_grace: float = PEER_GRACE
    """Seconds for the other ranks of a replica once one has died."""

    @classmethod
    def of_run(
        cls,
        config: Config,
        run: RunDir,
        environment: Callable[[ProcessSpec], Mapping[str, str]],
        hosts: Mapping[int, Host] | None = None,
        rendezvous: Callable[[], Mapping[str, str]] = _loopback,
    ) -> Setting:
        """The setting that the configuration of a job gives."""
        folders, budget = Folders.of_run(run), RestartBudget.of_config(config)
        return cls(folders, nsight.grace(config), budget, environment, hosts or {}, rendezvous)


@dataclass(slots=True)
class Supervised:
    """One replica under care."""

    replica: PlacedReplica
    restarts: Restarts
    after: str = ""
    keeps: str = ""
    private: str = ""
    state: State = "starting"
    stopping: bool = False
    hung: bool = False
    processes: dict[str, Process] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    last_exit: Exit | None = None
    since: float = 0.0
    """When its present processes were started, by the monotonic clock."""

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.ended]


class Supervisor:
    """All processes of one job."""

    def __init__(self, setting: Setting, observer: Observer) -> None:
        self.setting, self.observer = setting, observer
        self.hosts = {0: LocalHost(setting.folders, setting.grace, setting.environment), **setting.hosts}
        self.replicas: dict[str, Supervised] = {}
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    def launch(self, replica: PlacedReplica, *, after: str = "", keeps: str = "", private: str = "") -> Supervised:
        """Start a replica and keep it alive. after, keeps, private: see `ProcessOrder`."""
        restarts = Restarts(replica.name, replica.role, self.setting.budget)
        supervised = Supervised(replica, restarts, after, keeps, private)
        self.replicas[replica.name] = supervised
        supervised.task = asyncio.create_task(self._care(supervised), name=f"keep {replica.name}")
        supervised.task.add_done_callback(self._check_task)
        return supervised

    def running(self, names: Iterable[str] | None = None) -> list[Supervised]:
        """Replicas that are up or about to be."""
        chosen = self.replicas if names is None else names
        return [self.replicas[n] for n in chosen if n in self.replicas and not self.replicas[n].done.is_set()]

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
        self._signal(supervised, signal.SIGINT)

    async def stop(self, names: Iterable[str], grace: float | None = None) -> None:
        """End replicas in order: SIGTERM, `grace` seconds (default: the setting's), then kill. None is left."""
        chosen = self.running(names)
        for supervised in chosen:
            supervised.stopping = True
            if not supervised.alive and supervised.task is not None:
                supervised.task.cancel()
        wait = self.setting.grace if grace is None else grace
        for number, seconds in escalation(wait):
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
                outcome = await self.observer.exited(exit_)
                over = outcome.over or supervised.stopping
                verdict = restarts.exited(
                    ended_at, exit_.code, exit_.how, over=over, needed=outcome.needed, counts=outcome.counts
                )
                if isinstance(verdict, EndJob):
                    return self.end(verdict, exit_)
                if isinstance(verdict, Left):
                    if exit_.code == EXIT_UNLIKE:
                        self.observer.event(f"{replica.name} was refused by the other policy replicas, which go on")
                    return
                await self._back_off(supervised, verdict, exit_)
        except HostLostError as error:
            others = (kept.replica for kept in self.running() if kept is not supervised)
            if replica.role in ELASTIC and any(other.role is replica.role for other in others):
                return self.observer.event(f"{replica.name} is given up: {error}")
            self.end(EndJob(EXIT_FAILED, f"{replica.name} cannot go on: {error}"), supervised.last_exit)
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
        supervised.hung, supervised.processes = False, {}
        hosts = {spec.name: self.hosts[spec.node] for spec in replica.processes}
        for host in set(hosts.values()):
            await host.ready()
        supervised.state, supervised.since = "starting", time.monotonic()
        shared = self.setting.rendezvous() if replica.rendezvous else {}
        try:
            for spec in replica.processes:
                order = ProcessOrder(spec, shared, supervised.after, supervised.keeps, supervised.private)
                supervised.processes[spec.name] = await hosts[spec.name].spawn(order)
        except OSError:  # the ranks that were started would wait for this one, and would never end
            await self._end_peers(supervised)
            raise
        supervised.state = "up"
        if supervised.stopping:  # asked to stop between two spawns
            self._signal(supervised, signal.SIGTERM)
        culprit, end = replica.processes[0], ProcessEnd(EXIT_OK)
        waits = {asyncio.create_task(supervised.processes[spec.name].wait()): spec for spec in replica.processes}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                ended = [(waits.pop(task), task.result()) for task in done]
                failed = [(spec, status) for spec, status in ended if status.code != EXIT_OK]
                if failed and end.code == EXIT_OK:
                    culprit, end = failed[0]
                    await self._end_peers(supervised)
                elif end.code == EXIT_OK:
                    end = next((status for spec, status in ended if spec is culprit), end)
        finally:
            for task in waits:
                task.cancel()
        leader = supervised.processes[replica.processes[0].name].pid
        log_file = self.setting.folders.log_of(culprit)
        return Exit(
            replica, culprit.name, end.code, end.lines, log_file,
            leader, supervised.hung, end.out_of_memory, end.lost,
        )  # fmt: skip

    async def _end_peers(self, supervised: Supervised) -> None:
        if not supervised.alive:
            return
        self._signal(supervised, signal.SIGTERM)
        waits = [asyncio.create_task(process.wait()) for process in supervised.alive]
        profiled = any(spec.profiled for spec in supervised.replica.processes)
        timeout = self.setting.peer_grace + (nsight.REPORT_SECONDS if profiled else 0.0)
        _, late = await asyncio.wait(waits, timeout=timeout)
        if late:
            self._signal(supervised, signal.SIGINT)
            await asyncio.wait(late, timeout=keeper.KILL_TIMEOUT + KEEPER_MARGIN)

    @staticmethod
    def _signal(supervised: Supervised, number: signal.Signals) -> None:
        for process in supervised.alive:
            process.send_signal(number)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A fault of the supervisor itself ends the job instead of leaving a replica without care."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("supervision failed", exc_info=error)
            self.end(EndJob(1, f"the launcher could not {task.get_name()}: {type(error).__name__}: {error}"))


async def _wait_all(chosen: list[Supervised], seconds: float) -> None:
    waits = [asyncio.create_task(supervised.done.wait()) for supervised in chosen]
    _, late = await asyncio.wait(waits, timeout=seconds)
    for task in late:
        task.cancel()
