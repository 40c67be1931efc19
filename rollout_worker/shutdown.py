"""Why and how a replica leaves.

finished  the job has ended: nothing of what it holds is needed
stop      leave now: running samples are given up, finished ones are still pushed
drain     lease no more, finish what can be finished in time, push it, give back the rest

SIGTERM (a notice of a spot instance, `docker stop`, Kubernetes) and `POST /v1/replicas/{id}/drain` drain; a second
SIGTERM stops. Whatever hangs meanwhile (an engine that will not close, a model that still loads, a thread in a
library), `ExitWatchdog` ends the process within `launcher.shutdown_timeout`. By then everything that is finished has
been pushed and the leases are given back, or the controller does not answer and takes them back by itself.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from schema.config import Config
from schema.util.host import descends_from
from schema.util.threads import exit_after

log = logging.getLogger(__name__)

UNTIL_REGISTERED = 30.0
"""Seconds before the configuration says how long leaving may take: the default of its key."""

Kind = Literal["drain", "finished", "stop"]
_URGENCY: dict[Kind, int] = {"drain": 0, "finished": 1, "stop": 2}


class ShutdownRequest:
    """Made by signals, by the controller, or by the end of the job; a more urgent one replaces another."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.reason = ""
        self._asked, self._urgent = asyncio.Event(), asyncio.Event()
        self.on_asked: Callable[[], None] = lambda: None
        """Called on every request to shut down, the first time and when it becomes more urgent."""

    def ask(self, kind: Kind, reason: str) -> None:
        if self.kind is not None and _URGENCY[kind] <= _URGENCY[self.kind]:
            return
        log.info("leaving (%s): %s", kind, reason)
        self.kind, self.reason = kind, reason
        self._asked.set()
        self.on_asked()
        if kind != "drain":
            self._urgent.set()

    @property
    def asked(self) -> bool:
        return self.kind is not None

    async def wait(self) -> None:
        """Until anybody asks."""
        await self._asked.wait()

    async def wait_urgent(self) -> None:
        """Until leaving cannot wait for running samples."""
        await self._urgent.wait()

    def install_signals(self) -> None:
        """SIGTERM drains, SIGINT too (a terminal sends it to every process); the second one stops."""

        def on_signal(number: signal.Signals) -> None:
            self.ask("stop" if self.asked else "drain", f"{number.name} received")

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    def check_parent(self, parent: int | None) -> None:
        """Leave when the launcher (its pid is in COSMOS_PARENT_PID) is not above this process any more."""
        if parent is not None and not descends_from(parent):
            self.ask("stop", f"the launcher (pid {parent}) is gone")


@dataclass(frozen=True, slots=True)
class LeavingTimes:
    """How the time that a replica has for leaving is divided; seconds. What remains is for closing the engine."""

    finish: float
    """Running samples may go on so long."""
    push: float
    """Then what is finished is pushed."""
    goodbye: float
    """Then the controller is informed, and takes back the rest."""


def leaving_times(shutdown_timeout: float) -> LeavingTimes:
    """Most of the time is for what cannot be had again; pushes take milliseconds where the controller answers."""
    return LeavingTimes(0.6 * shutdown_timeout, min(5.0, 0.15 * shutdown_timeout), min(5.0, 0.1 * shutdown_timeout))


class ExitWatchdog:
    """Counts from the first `start`."""

    def __init__(self, exit_code: int) -> None:
        self.seconds = UNTIL_REGISTERED
        self._exit_code = exit_code
        self._started = False

    def configure(self, config: Config) -> None:
        """The configuration has come: it says how long."""
        self.seconds = config.launcher.shutdown_timeout

    def start(self) -> None:
        """The replica was asked to leave."""
        if not self._started:
            self._started = True
            exit_after(self.seconds, self._exit_code, "launcher.shutdown_timeout")
