"""Processes of one pod: they live together, and what the first one that fails said is the reason of the pod's end.

Restarts are the platform's. Signals are passed on, and nobody is killed for being slow: the platform does that, too.
Who lives and is not heard of any more is killed, so that the platform starts it again.
Output goes through this process line by line, so that its end can be explained.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.restarts import EXIT_OK, SIGNALLED, describe_exit

REMEMBERED = 12
"""Last lines of a process that explain its end."""
LONGEST_LINE = 2**20
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """How it went. signalled: the first signal that asked all to leave; 0: none did."""

    code: int
    reason: str
    signalled: int = 0


@dataclass
class _Child:
    name: str
    process: asyncio.subprocess.Process
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    async def ended(self) -> tuple[_Child, int]:
        """Pass its output on until it is over; its exit code, as a shell has it."""
        assert self.process.stdout is not None
        while line := await _line(self.process.stdout):
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self.lines.append(line.decode(errors="replace").rstrip())
        code = await self.process.wait()
        return self, SIGNALLED - code if code < 0 else code

    def send(self, number: int) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or a piece of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


async def run(commands: Sequence[Command], hung: Coroutine[None, None, str] | None = None) -> Ended:
    """Run them to their end. When one fails the others are asked to leave. hung: ends when they must be killed, and
    says why."""
    children: list[_Child] = []
    signals: list[int] = []

    def pass_on(number: int) -> None:
        if number != signal.SIGUSR1:
            signals.append(number)
        for child in children:
            child.send(number)

    async def kill_hung(why: Coroutine[None, None, str]) -> None:
        reason = await why
        for child in children:
            child.lines.clear()
            child.lines.append(reason)
            child.send(signal.SIGKILL)

    loop = asyncio.get_running_loop()
    watching = None if hung is None else loop.create_task(kill_hung(hung))
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number in PASSED_ON:
        loop.add_signal_handler(number, pass_on, number)
    try:
        for command in commands:
            children.append(await _start(command))
            if signals:  # it came while the process was started
                children[-1].send(signals[0])
        first, failed = EXIT_OK, ""
        for ended in asyncio.as_completed([child.ended() for child in children]):
            child, code = await ended
            if code != EXIT_OK and not failed:
                first, failed = code, f"{child.name}: {describe_exit(code)}\n" + "\n".join(child.lines)
                for other in children:
                    other.send(signal.SIGTERM)
        return Ended(first, failed or "ended in order", signals[0] if signals else 0)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for number in PASSED_ON:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
        for child in children:
            child.send(signal.SIGKILL)


async def _start(command: Command) -> _Child:
    process = await asyncio.create_subprocess_exec(
        *command.argv,
        env={**command.env, "COSMOS_PARENT_PID": str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=LONGEST_LINE,
    )
    return _Child(command.name, process)
