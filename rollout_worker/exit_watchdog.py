"""The last resort of a replica that leaves: whatever hangs (an engine that will not close, a model that still loads,
a thread in a library), the process is gone within `launcher.shutdown_timeout` after it was asked to.

A thread of its own, since the event loop may be what hangs. By then everything that is finished has been pushed and
the leases are given back, or the controller does not answer and takes them back by itself.
"""

from __future__ import annotations

import logging

from schema.config import Config
from schema.util.exit_watchdog import exit_after

log = logging.getLogger(__name__)

UNTIL_REGISTERED = 30.0
"""Seconds before the configuration says how long leaving may take: the default of its key."""


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
