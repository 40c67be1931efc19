"""`cosmos-launch stop`: ends a job, whatever of it is still alive.

launcher alive, controller answers   it is asked to stop; the launcher sees that and ends everything in order
launcher alive, no controller        the launcher gets a Ctrl-C
launcher killed                      its processes leave by themselves
--now                                the launcher gets Ctrl-C twice; without one the keepers kill what they keep

A signal never reaches a foreign process: a process file descriptor is opened first, and the check follows that the
process has the lock's file open. As long as the descriptor is open its id is not reused, so what was checked is what
gets the signal.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from launcher.errors import LaunchError
from launcher.job.remote import RemoteJob, no_controller
from launcher.locks import has_open
from launcher.plan.rundir import RunDir, RunHolder
from launcher.restarts import EXIT_FAILED

POLL = 0.1
AGAIN = 0.5
"""Seconds between two signals: the first one must have been noticed, or the second is lost in it."""
KILL_SECONDS = 30.0
"""For killed processes to be gone: only one in an uninterruptible system call takes longer."""


def stop(target: RemoteJob, *, now: bool, wait: float) -> str:
    """End the job; what was done, for people. Raises LaunchError if it cannot be, or is not over after `wait` s."""
    if target.run is None:
        return _stop_by_url(target, now=now, wait=wait)
    run = target.run
    if not run.is_alive():
        done = _stop_without_launcher(target, run, now)
    elif now:
        done = _kill(run)
    else:
        done = _ask_to_stop(target, run)
    if now:
        return done
    if wait and not _gone(run, wait):
        raise _not_over(run, wait)
    return f"{done}, and all its processes have left" if wait else f"{done}; its processes are leaving"


def _ask_to_stop(target: RemoteJob, run: RunDir) -> str:
    """Through the controller, else by a Ctrl-C; never by a second one, which would kill what ends in order."""
    from controller.client import calls as api

    if ending := run.launcher().get("ending"):
        return f"it is ending already ({ending})"
    try:
        target.ask(api.operate("stop"))
        return "stopped"
    except LaunchError as error:
        holder = run.holder()
        if holder is None or not holder.is_here:
            raise error from None
        if not signal_launcher(run, holder, signal.SIGINT):
            raise no_controller(target) from None
        return f"its controller does not answer: its launcher (pid {holder.pid}) was signalled to stop"


def _stop_without_launcher(target: RemoteJob, run: RunDir, now: bool) -> str:
    leaving = run.leaving()
    if not leaving:
        raise no_controller(target)
    if not now:
        return f"its launcher is gone already ({', '.join(leaving)} left to end)"
    count = signal_keepers(run, signal.SIGINT)
    if not count and not _gone(run, AGAIN):
        raise LaunchError(
            f"the keepers of {', '.join(run.leaving())} cannot be signalled from here",
            "stop the run as the user who started it, on its machine",
            EXIT_FAILED,
        )
    if not _gone(run, KILL_SECONDS):
        raise _not_over(run, KILL_SECONDS)
    return f"killed {count} processes whose launcher was gone"


def _kill(run: RunDir) -> str:
    """Ctrl-C, again and again until the launcher has killed everything and left."""
    holder = run.holder()
    if holder is None:
        raise LaunchError(f"the launcher of {run.path} is starting or ending right now", "try again", EXIT_FAILED)
    if not holder.is_here:
        raise LaunchError(f"the launcher of {run.path} is {holder}", "use --now on that machine", EXIT_FAILED)
    give_up = time.monotonic() + KILL_SECONDS
    while signal_launcher(run, holder, signal.SIGINT) and time.monotonic() < give_up:
        _gone(run, AGAIN)
    if not _gone(run, KILL_SECONDS):
        raise _not_over(run, KILL_SECONDS)
    return "killed"


def _gone(run: RunDir, seconds: float) -> bool:
    """Wait until no process of the run is left."""
    give_up = time.monotonic() + seconds
    while run.is_alive() or run.leaving():
        if time.monotonic() >= give_up:
            return False
        time.sleep(POLL)
    return True


def _not_over(run: RunDir, seconds: float) -> LaunchError:
    running = [*(["launcher"] if run.is_alive() else []), *run.leaving()]
    return LaunchError(
        f"{run.path} has not ended within {seconds:g} s; still there: {', '.join(running)}",
        f"wait longer (launcher.shutdown_timeout bounds it), or `cosmos-launch stop {run.path} --now`",
        EXIT_FAILED,
    )


def _stop_by_url(target: RemoteJob, *, now: bool, wait: float) -> str:
    from controller.client import calls as api

    if now:
        raise LaunchError(
            "--now kills processes, which a URL does not reach",
            "use --now with the run directory, on the machine that runs the job",
        )
    phase = target.ask(api.operate("stop")).phase
    give_up = time.monotonic() + wait
    while wait and time.monotonic() < give_up:
        try:
            target.ask(api.job())
        except LaunchError:
            return "stopped, and its controller has left"
        time.sleep(POLL)
    if wait:
        raise LaunchError(f"{target.url} still answers after {wait:g} s", "wait longer", EXIT_FAILED)
    return f"{phase}; its processes are leaving"


def signal_launcher(run: RunDir, holder: RunHolder, number: signal.Signals) -> bool:
    """Signal the launcher of a run; False if it has gone. Raises LaunchError if another process has been named."""

    def is_meant() -> bool:
        holds = run.holder() == holder and has_open(holder.pid, run.locks / "launcher.lock")
        if not holds and run.holder() == holder:
            raise LaunchError(
                f"{run.locks}/launcher.lock names process {holder.pid}, which does not hold it: nothing is signalled",
                "stop the run on the machine, or in the container, where it runs",
                EXIT_FAILED,
            )
        return holds

    return _send(holder.pid, number, is_meant)


def signal_keepers(run: RunDir, number: signal.Signals) -> int:
    """Signal the keepers of all processes of a run; how many there were. Raises LaunchError as above."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return sum(_send(pid, number, partial(_keeps, pid, run)) for pid in pids if _keeps(pid, run))


def _send(pid: int, number: signal.Signals, is_meant: Callable[[], bool]) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(handle, number)
        signal.pidfd_send_signal(handle, signal.SIGCONT)  # one that was stopped acts on it, too
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        raise LaunchError(
            f"process {pid} of this run belongs to another user and cannot be signalled",
            "stop the run as the user who started it (root sees it only with CAP_SYS_PTRACE)",
            EXIT_FAILED,
        ) from None
    finally:
        os.close(handle)
    return True


def _keeps(pid: int, run: RunDir) -> bool:
    """Whether a process is a keeper of this run: its arguments name a lock of the run, and it has that file open."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        script = next(i for i, part in enumerate(argv) if part.endswith("/keeper.py"))
        hold = json.loads(argv[script + 1])["hold"]
    except (OSError, StopIteration, ValueError, KeyError, IndexError, TypeError):
        return False
    if not hold or Path(hold).parent.resolve() != run.locks.resolve():
        return False
    with suppress(OSError):  # another user may have given a process of his these arguments
        return has_open(pid, Path(hold))
    return False
