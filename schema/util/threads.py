"""Daemon threads: for work that a process which has to end does not wait for, and for ending a process that hangs."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
PARENT_POLL = 0.5
"""Seconds between two looks at whether the parent is there."""
GIL_GRACE = 2.0
"""Seconds after which the process ends even if a thread keeps the interpreter's lock (then with exit code 1)."""


def in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Do a work in a daemon thread of its own; the future has what it returns or raises. It cannot be cancelled.

    Raises `RuntimeError` when no thread can be started.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


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


def end_with_parent(parent: int | None = None) -> None:
    """End this process soon after its parent has ended. parent: its id; None: the present one."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
