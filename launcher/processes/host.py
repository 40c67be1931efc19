"""Where a job's processes run: on the launcher's machine here, on others through `launcher.nodes`.

Every process runs below a keeper (`launcher.processes.keeper`) in a session of its own, so that Ctrl-C reaches the
launcher alone and no grandchild survives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from launcher.plan import nsight
from launcher.plan.placement import ProcessSpec
from launcher.plan.rundir import RunDir
from launcher.processes import keeper
from launcher.processes.logs import tail
from launcher.processes.private_directory import make_private
from launcher.restarts import EXIT_OK
from schema.util.memory_kills import LOOK_EVERY, RecentKills

MFD_NOEXEC_SEAL = 0x8
"""A flag of memfd_create: the kernel never executes what is in the file."""
KEEPER_MARGIN = 3.0
"""Seconds that a keeper gets beyond what it grants its process."""
STOPPED_PATIENCE = keeper.STOPPED_PATIENCE
"""Seconds after which a keeper continues a process that was stopped."""
OF_KEEPERS = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR")
"""Variables that a keeper itself has. Those of its process, secrets among them, it gets by a file in memory."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended. Codes above 128 are signals, as in a shell."""

    code: int
    lines: tuple[str, ...] = ()
    """The last ones that it wrote."""
    out_of_memory: str = ""
    """How the kernel killed it, or a process of the job while it ran, for lack of memory; empty: it did not."""
    lost: str = ""
    """The fate of its machine, if that is why nothing is known of it; empty: it is there."""


class Process(Protocol):
    """One process that was started. `pid` is that of its keeper."""

    @property
    def pid(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    async def wait(self) -> ProcessEnd: ...

    def send_signal(self, number: signal.Signals) -> None:
        """SIGTERM asks it to end, SIGINT kills its whole tree, SIGKILL kills the keeper too."""


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """A process to start. env: what its replica's processes agree on at each start.

    after: role that must be gone before it ends without a launcher. Each start makes two directories where they are
    missing: `keeps`, where it keeps its files, and `private`, which no other user may have or enter. The launcher
    removes the latter, or the keeper if the launcher is dead.
    """

    spec: ProcessSpec
    env: Mapping[str, str]
    after: str = ""
    keeps: str = ""
    private: str = ""


def escalation(grace: float) -> list[tuple[signal.Signals, float]]:
    """The signals that end a process, in order, and the seconds that it has to act on each."""
    return [
        (signal.SIGTERM, grace + KEEPER_MARGIN),
        (signal.SIGINT, keeper.KILL_TIMEOUT + KEEPER_MARGIN),
        (signal.SIGKILL, KEEPER_MARGIN),
    ]


class Host(Protocol):
    """A machine that can run processes."""

    async def ready(self) -> None:
        """Wait until it is there. Raises `HostLostError` if that takes too long."""

    async def spawn(self, order: ProcessOrder) -> Process:
        """Start a process. Raises OSError."""


class HostLostError(Exception):
    """A machine that the job cannot go on without is not there; the message names it."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where processes write and what they lock."""

    logs: Path
    locks: Path
    profiles: Path = Path()

    @classmethod
    def of_run(cls, run: RunDir) -> Folders:
        """The folders of a run directory."""
        return cls(run.logs, run.locks, run.profiles)

    def log_of(self, spec: ProcessSpec) -> Path:
        return self.logs / f"{spec.name}.log"


class LocalHost:
    """This machine. environment: gives a process its whole environment, secrets included. grace: seconds."""

    def __init__(
        self, folders: Folders, grace: float, environment: Callable[[ProcessSpec], Mapping[str, str]]
    ) -> None:
        self.folders, self.grace, self._environment = folders, grace, environment

    async def ready(self) -> None:
        """It always is."""

    async def spawn(self, order: ProcessOrder) -> LocalProcess:
        spec, folders = order.spec, self.folders
        role = "workers" if spec.role not in ("redis", "controller") else str(spec.role)
        # Somebody may have removed what the process needs.
        folders.logs.mkdir(parents=True, exist_ok=True)
        for folder in (folders.locks, *([Path(order.keeps)] if order.keeps else [])):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if order.private:
            make_private(Path(order.private))
        settings = keeper.KeeperSettings(
            parent=os.getpid(),
            grace=self.grace,
            hold=str(folders.locks / f"{role}.lock"),
            after=str(folders.locks / f"{order.after}.lock") if order.after else "",
            remove=order.private,
            under=nsight.command(folders.profiles, spec.name) if spec.profiled else (),
        )
        if spec.profiled:
            folders.profiles.mkdir(parents=True, exist_ok=True)
            folders.profiles.chmod(0o700)  # a report may hold the environment, and so a token
        log_file = folders.log_of(spec)
        with log_file.open("ab") as output:
            begins = output.tell()
            started = await start_kept(
                settings,
                spec.argv,
                {**self._environment(spec), **order.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return LocalProcess(started, log_file, begins)


class LocalProcess:
    """A process of this machine; its part of `log_file` starts at byte `begins`."""

    def __init__(self, started: asyncio.subprocess.Process, log_file: Path, begins: int) -> None:
        self._process, self._log_file, self._begins = started, log_file, begins
        self._kills = RecentKills()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> ProcessEnd:
        code = self._process.returncode
        while code is None:
            self._kills.look()
            self._continue()
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    code = await self._process.wait()
            except TimeoutError:
                continue
        if code < 0:
            await _sweep(self.pid)
            code = 128 - code
        memory = self._kills.cause() if code != EXIT_OK else ""
        return ProcessEnd(code, tuple(tail(self._log_file, since=self._begins)), memory)

    def send_signal(self, number: signal.Signals) -> None:
        if self.ended:
            return
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)  # a keeper that was stopped acts on it, too
        except ProcessLookupError:
            return

    def _continue(self) -> None:
        """A keeper that was stopped would see neither the end of its process nor the launcher's signals."""
        if not keeper.is_stopped(self.pid):
            return
        self.send_signal(signal.SIGCONT)
        with suppress(OSError), self._log_file.open("a") as log:
            log.write(f"launcher: keeper {self.pid} was stopped (SIGSTOP): continuing it\n")


async def start_kept(
    settings: keeper.KeeperSettings, argv: Sequence[str], env: Mapping[str, str], **files: Any
) -> asyncio.subprocess.Process:
    """Start a keeper and its process. files: stdin, stdout and stderr of both. Raises OSError."""
    with _in_memory(json.dumps(dict(env)).encode()) as values:
        handed = dataclasses.replace(settings, environment=values.fileno(), stopped=STOPPED_PATIENCE)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", keeper.__file__, handed.to_json(), *argv,
            **files,
            env={name: os.environ[name] for name in OF_KEEPERS if name in os.environ},
            pass_fds=(values.fileno(),),
            start_new_session=True,
        )  # fmt: skip


def _in_memory(data: bytes) -> BinaryIO:
    """A file that has no name and holds `data`."""
    try:
        handle = os.memfd_create("cosmos", os.MFD_CLOEXEC | MFD_NOEXEC_SEAL)
    except OSError:  # a kernel before 6.3 does not have this flag, a hardened one demands it
        handle = os.memfd_create("cosmos")
    file = os.fdopen(handle, "w+b")
    file.write(data)
    file.seek(0)
    return file


async def _sweep(killed_keeper: int) -> None:
    """Kill what a killed keeper could not: its process is killed by the kernel, the children of that one are not."""
    give_up = time.monotonic() + KEEPER_MARGIN
    while (leftovers := keeper.left_behind(killed_keeper)) and time.monotonic() < give_up:
        kill_all(leftovers)
        await asyncio.sleep(0.01)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
