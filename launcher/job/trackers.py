"""The process that feeds trackers (`launcher.trackers`), as a job has it: nothing that it does ends the job."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from schema.config import Config

CLOSE_SECONDS = 70.0
"""For trackers to store what they have, a little more than they get (`launcher.trackers.__main__`)."""


def names(config: Config) -> list[str]:
    """The trackers that have to be fed: all but the console, which the launcher is."""
    return [name for name in dict.fromkeys(config.logging.logger) if name != "console"]


def command(config: Config, run_dir: Path) -> list[str] | None:
    """What feeds the trackers; None: there are none."""
    chosen = names(config)
    python = config.logging.tracker_python or sys.executable
    return [python, "-P", "-m", "launcher.trackers", str(run_dir), *chosen] if chosen else None


class Trackers:
    """Started with the job; `finish` waits until they have everything, or the time is over."""

    def __init__(
        self, config: Config, run_dir: Path, env: Mapping[str, str], event: Callable[[str], None]
    ) -> None:
        self._command = command(config, run_dir)
        self._run_dir, self._env, self._event = run_dir, env, event
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, if there are trackers."""
        if self._command is None:
            return
        with (self._run_dir / "logs" / "trackers.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=self._env,
                start_new_session=True,
            )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._event(line.decode(errors="replace").rstrip())

    async def finish(self) -> None:
        """The events are all written: let trackers get what is left, and end."""
        process = self._process
        if process is None or self._reading is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
                await self._reading
        except TimeoutError:
            self._event(f"trackers did not end within {CLOSE_SECONDS:.0f} s; see logs/trackers.log")
            self.kill()
        else:
            if process.returncode:
                self._event(f"trackers ended with exit code {process.returncode}; see logs/trackers.log")

    def kill(self) -> None:
        """At once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._reading is not None:
            self._reading.cancel()
