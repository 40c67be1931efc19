"""Ends a process that was asked to leave and does not, whatever hangs: an event loop, a collective, a library."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import sys
import threading

log = logging.getLogger(__name__)

GIL_GRACE = 2.0
"""Seconds after which the process ends even if a thread keeps the interpreter's lock (then with exit code 1)."""


def exit_after(seconds: float, exit_code: int, limit: str) -> None:
    """Kill the children of this process and end it after `seconds`, with the stacks of its threads in its log.

    limit: the config key or constant that sets `seconds`, for the log.
    """

    def end() -> None:
        log.error("leaving took more than %.0f s (%s): ending the process", seconds, limit)
        faulthandler.dump_traceback(all_threads=True)
        for child in multiprocessing.active_children():
            child.kill()
        sys.stderr.flush()
        os._exit(exit_code)

    faulthandler.dump_traceback_later(seconds + GIL_GRACE, exit=True)
    timer = threading.Timer(seconds, end)
    timer.name, timer.daemon = "exit-watchdog", True
    timer.start()
