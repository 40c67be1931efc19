"""Signals to processes of a run that somebody else started: never to a stranger that was given an old process id.

A process file descriptor is opened first and the check made afterwards: as long as the descriptor is open its id is
given to nobody else, so what was checked is what gets the signal.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from launcher.errors import LaunchError
from launcher.plan.rundir import Holder, RunDir
from launcher.restarts import EXIT_FAILED


def signal_launcher(run: RunDir, holder: Holder, number: signal.Signals) -> bool:
    """Signal the launcher of a run; False if it has gone. Raises LaunchError if it is another user's."""
    return _send(holder.pid, number, lambda: run.holder() == holder)


def signal_keepers(run: RunDir, number: signal.Signals) -> int:
    """Signal the keepers of all processes of a run; how many there were. Raises LaunchError as above."""
    return sum(_send(pid, number, partial(_keeps, pid, run)) for pid in _all_pids() if _keeps(pid, run))


def _send(pid: int, number: signal.Signals, is_meant: Callable[[], bool]) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise LaunchError(
            f"process {pid} of this run belongs to somebody else: it cannot be signalled",
            "stop the run as the user who started it",
            EXIT_FAILED,
        ) from None
    finally:
        os.close(handle)
    return True


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _keeps(pid: int, run: RunDir) -> bool:
    """Whether a process is a keeper of this run: its arguments name the lock that it holds."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        script = next(i for i, part in enumerate(argv) if part.endswith("/keeper.py"))
        hold = json.loads(argv[script + 1])["hold"]
    except (OSError, StopIteration, ValueError, KeyError, IndexError, TypeError):
        return False
    return bool(hold) and Path(hold).parent.resolve() == run.locks.resolve()
