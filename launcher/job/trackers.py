"""The process that feeds trackers (`launcher.trackers`), as a job has it: nothing that it does ends the job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.plan.credentials import given_to_trackers
from launcher.processes import keeper
from launcher.processes.host import LocalProcess, start_kept
from launcher.restarts import EXIT_OK, HEALTHY_AFTER, describe_exit
from schema.config import Config
from schema.util.backoff import Backoff

CLOSE_SECONDS = 70.0
"""For trackers to store what they have, a little more than they get (`launcher.trackers.__main__`)."""
BACKOFF = Backoff(first=5.0, most=600.0)
"""Between starts. What trackers have is on disk, so a new process goes on where the last one was."""


def names(config: Config) -> list[str]:
    """The trackers that have to be fed: all but the console, which the launcher is."""
    return [name for name in dict.fromkeys(config.logging.logger) if name != "console"]


def command(config: Config, run_dir: Path) -> list[str] | None:
    """Return the command line that feeds the trackers; None: there are none."""
    chosen = names(config)
    python = config.logging.tracker_python or sys.executable
    return [python, "-P", "-m", "launcher.trackers", str(run_dir), *chosen] if chosen else None


class Trackers:
    """Started with the job, and again when it dies; `finish` waits until they have everything, or time is over."""

    def __init__(self, config: Config, run_dir: Path, env: Mapping[str, str], event: Callable[[str], None]) -> None:
        self._command = command(config, run_dir)
        self._run_dir, self._event = run_dir, event
        self._env = given_to_trackers(config.logging.logger, env)
        self._settings = keeper.KeeperSettings(os.getpid(), CLOSE_SECONDS, str(run_dir / ".locks" / "trackers.lock"))
        self._process: asyncio.subprocess.Process | None = None
        """Its keeper."""
        self._kept: LocalProcess | None = None
        self._care: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    def start(self) -> None:
        """Start the process, if there are trackers."""
        if self._command is not None:
            self._care = asyncio.create_task(self._keep(self._command), name="keep trackers")

    async def _keep(self, command: Sequence[str]) -> None:
        attempt = 0
        while True:
            began = time.monotonic()
            how = await self._run(command)
            if self._over.is_set():
                if how:
                    self._event(f"trackers ended ({how}); see logs/trackers.log")
                return
            attempt = 1 if time.monotonic() - began >= HEALTHY_AFTER else attempt + 1
            delay = BACKOFF.after(attempt)
            self._event(
                f"trackers ended ({how or describe_exit(EXIT_OK)}) and are started again in {delay:.1f} s; "
                "see logs/trackers.log"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), delay)

    async def _run(self, command: Sequence[str]) -> str:
        """Until the process ends; how, empty where it was in order."""
        log_file, pipe = self._run_dir / "logs" / "trackers.log", asyncio.subprocess.PIPE
        if shutil.which(command[0]) is None:
            return f"not started: {command[0]} is not a program"
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("ab") as log:
                process = self._process = await start_kept(
                    self._settings, command, self._env, stdin=pipe, stdout=pipe, stderr=log
                )
        except OSError as error:
            return f"not started: {error}"
        self._kept = LocalProcess(process, log_file, 0)
        ending = asyncio.create_task(self._kept.wait())
        try:
            if self._over.is_set():
                self._end_input()
            assert process.stdout is not None
            async for line in process.stdout:
                self._event(line.decode(errors="replace").rstrip())
            code = (await ending).code
        finally:
            ending.cancel()
        return describe_exit(code) if code else ""

    async def finish(self) -> None:
        """The events are all written: let trackers get what is left, and end."""
        if self._care is None:
            return
        self._over.set()
        self._end_input()
        try:
            await asyncio.wait_for(self._care, CLOSE_SECONDS)
        except TimeoutError:
            self._event(f"trackers did not end within {CLOSE_SECONDS:.0f} s; see logs/trackers.log")
            self.kill()

    def _end_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """At once."""
        if self._kept is not None:
            self._kept.send_signal(signal.SIGINT)
        if self._care is not None:
            self._care.cancel()
