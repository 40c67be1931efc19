"""Processes of one pod: they live together, and what the first one that fails said is the reason of the pod's end.

Restarts are the platform's. Signals are passed on, and nobody is killed for being slow: the platform does that, too.
A process that lives and has been silent for too long is killed, so that the platform starts it again.
Output goes through this process line by line, so that its end can be explained.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.processes.host import Folders, ProcessEnd, ProcessOrder
from launcher.processes.share import attended
from launcher.processes.signals import queued_signals
from launcher.processes.supervisor import ONCE, Always, Setting, Supervisor
from launcher.restarts import EXIT_FAILED, EXIT_OK, NO_RESTARTS, SIGNALLED, describe_exit

REMEMBERED = 12
"""Last lines of a process that explain its end."""
LONGEST_LINE = 2**20
Environment = Callable[[ProcessSpec], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class EndedChildren:
    """How the processes ended. signalled: the first signal that asked all to leave; 0: none did."""

    code: int
    reason: str
    signalled: int = 0


class Child:
    """A process of this pod, without a keeper: what the container's first process leaves behind, the kernel kills."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.pid = process, process.pid
        self._ending = asyncio.create_task(self._pass_on())

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> ProcessEnd:
        return await asyncio.shield(self._ending)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.ended:
            kills = number in (signal.SIGINT, signal.SIGKILL)  # see `launcher.processes.host.Process`
            self._process.send_signal(signal.SIGKILL if kills else number)

    async def _pass_on(self) -> ProcessEnd:
        """Pass the output on until it is over; how the process ended."""
        lines: deque[str] = deque(maxlen=REMEMBERED)
        assert self._process.stdout is not None
        while line := await _line(self._process.stdout):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            lines.append(line.decode(errors="replace").rstrip())
        code = await self._process.wait()
        return ProcessEnd(SIGNALLED - code if code < 0 else code, tuple(lines))


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a piece of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


@dataclass(frozen=True, slots=True)
class PodHost:
    """This pod. environment: gives a process its whole environment, secrets included."""

    environment: Environment

    async def ready(self) -> None:
        """It always is."""

    async def spawn(self, order: ProcessOrder) -> Child:
        process = await asyncio.create_subprocess_exec(
            *order.spec.argv,
            env={**self.environment(order.spec), "COSMOS_PARENT_PID": str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LONGEST_LINE,
        )
        return Child(process)


async def run(
    processes: tuple[ProcessSpec, ...], environment: Environment, hung: Coroutine[None, None, str] | None = None
) -> EndedChildren:
    """Run the processes to their end. When one fails the others are asked to leave.

    hung: ends when all must be killed, and says why.
    """
    replica = PlacedReplica("pod", processes[0].role, processes)
    hosts = dict.fromkeys((spec.node for spec in processes), PodHost(environment))
    nowhere = Folders(Path(), Path())
    setting = Setting(nowhere, inf, NO_RESTARTS, environment, hosts, peer_grace=inf)
    supervisor, why = Supervisor(setting, Always(ONCE)), ""

    async def kill_hung(work: Coroutine[None, None, str]) -> None:
        nonlocal why
        why = await work
        supervisor.kill(replica.name)

    def save_checkpoint() -> None:
        for process in supervisor.replicas[replica.name].alive:
            process.send_signal(signal.SIGUSR1)

    kept = supervisor.launch(replica)
    watching = None if hung is None else asyncio.create_task(kill_hung(hung))
    try:
        with queued_signals(save_checkpoint) as interrupts:
            number = await attended(kept.done.wait(), interrupts)
            if number is not None:
                await supervisor.stop([replica.name])
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await supervisor.kill_all()
    exit_ = kept.last_exit
    if exit_ is None:  # it was asked to leave, or failed, before all were started
        code = SIGNALLED + number if number else EXIT_FAILED
        reason = supervisor.ended.result().verdict.reason if supervisor.ended.done() else describe_exit(code)
        return EndedChildren(code, reason, number or 0)
    if exit_.code == EXIT_OK:
        return EndedChildren(EXIT_OK, "ended in order", number or 0)
    lines = [why] if exit_.hung else exit_.lines
    return EndedChildren(
        exit_.code, "\n".join([f"{exit_.process}: {describe_exit(exit_.code)}", *lines]), number or 0
    )
