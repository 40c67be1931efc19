"""The parent of one process of the job: nothing below it outlives it, and it does not outlive the launcher.

    launcher ── keeper ── worker ── the worker's own children (engine cores, reward processes, …)

    SIGTERM, launcher alive   pass it on; after `grace` seconds kill the whole tree
    launcher dead (kill -9)   wait until the users of this process are gone (`after`), then the same
    SIGINT                    kill the whole tree at once
    SIGHUP                    nothing
    worker ended              give its children a moment, kill what is left, exit with the worker's code
    worker stopped            (SIGSTOP, or one of its session) continue it after `KeeperSettings.stopped` seconds
    keeper stopped            the launcher continues it (`launcher.processes.host`)
    keeper killed             the worker is killed by the kernel (PR_SET_PDEATHSIG)

A profiler may stand in between (`KeeperSettings.under`): it is the child then, and starts the worker. SIGTERM still
goes to the worker itself, so it ends as ever, and the profiler, which gets no signal, writes its report and exits
with the worker's code; `grace` is for both. Killed is the whole tree. If the keeper is killed, the kernel kills the
profiler, and the worker, which has lost the keeper among its ancestors, leaves.

A stopped process is continued and not killed: nothing is lost by it, and whatever the others have decided about a
process that was silent holds. Processes with a session of their own (those of rewards, and what they start) are the
business of the process that started them.

It is a sub-reaper: a grandchild that lost its parent stays in this tree, even from a session of its own.
`hold` is a lock file held (shared) for as long as the keeper lives; `after` is one that must be free first. So
workers end before the controller, and the controller before Redis, without anybody left to conduct them.

The environment of the worker comes through a file in memory (`KeeperSettings.environment`, a descriptor): a keeper
has no use for the secrets in it.

Run as a script with `python -I -S`, standard library only: it starts in 20 ms and stays at 10 MB.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL = 1.0
"""Seconds between looks at the parent, where the kernel cannot report its death."""
LOOK = 0.1
"""Seconds between looks for a worker that a profiler starts."""
LEFTOVER_GRACE = 2.0
"""Seconds for the worker's children after its end: enough to notice a closed pipe and release shared memory."""
HOLD_PATIENCE = 5.0
"""Seconds to get hold of `hold`: a process that checks whether it is held has it for a moment."""
LOOK_AT_STOPPED = 5.0
"""Seconds between looks for stopped processes."""
STOPPED_PATIENCE = 30.0
"""Seconds after which a stopped process is continued."""
KILL_TIMEOUT = 10.0
"""Seconds to wait for killed processes: only one in an uninterruptible system call takes longer."""


@dataclass(frozen=True)
class KeeperSettings:
    """The launcher's settings for a keeper; times are seconds."""

    parent: int
    grace: float
    hold: str = ""
    after: str = ""
    remove: str = ""
    """A directory of the launcher's, removed here if the launcher is dead."""
    under: tuple[str, ...] = ()
    """Command line of a profiler that starts the worker."""
    environment: int = -1
    """Descriptor of a file with the worker's environment as JSON; -1: it has the keeper's own."""
    stopped: float = STOPPED_PATIENCE
    """Seconds after which a stopped process is continued."""

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @classmethod
    def from_json(cls, text: str) -> KeeperSettings:
        values = json.loads(text)
        return cls(**{**values, "under": tuple(values.get("under", ()))})


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing happens and the polling of the parent has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """All living processes below `root`, from /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry))
    below_root: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        below_root += below
        todo += below
    return below_root


def stopped(root: int) -> list[int]:
    """Processes below `root`, of its session, that SIGSTOP or its like has stopped (a debugger's are not meant)."""
    halted, todo = [], [root]
    while todo:
        below = _children(todo.pop())
        todo += below
        for pid in below:
            stat = _stat(pid)
            if stat is not None and stat[0] == "T" and stat[3] == str(os.getsid(0)):
                halted.append(pid)
    return halted


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or its like has stopped a process."""
    stat = _stat(pid)
    return stat is not None and stat[0] == "T"


def _children(pid: int) -> list[int]:
    """Children of a process; cheaper than `descendants`, and it may miss one that has just been started."""
    children: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:  # gone, or a kernel without this file
        pass
    return children


def running(root: int, argv: list[str]) -> int | None:
    """The highest process below `root` with these arguments, whatever its program is called; None: there is none."""
    arguments = [os.fsencode(argument) for argument in argv[1:]]
    for pid in descendants(root):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1] == arguments:
                return pid
        except OSError:
            continue
    return None


def left_behind(keeper: int) -> list[int]:
    """Living processes of a keeper that was killed: those of its session, or with its id in their environment.

    Either may fail for one process (setsid; a program that overwrites its environment to set its title), both do
    not in the programs that we start.
    """
    mark = f"COSMOS_PARENT_PID={keeper}".encode()
    leftovers = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or (stat := _stat(int(entry))) is None:
            continue
        try:
            marked = mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            marked = False
        if marked or stat[3] == str(keeper):
            leftovers.append(int(entry))
    return leftovers


def _stat(pid: int) -> list[str] | None:
    """State, parent, group, session, … of a living process; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


class Keeper:
    """Runs one command until its end; see the module's picture."""

    def __init__(self, settings: KeeperSettings, argv: list[str]) -> None:
        self.settings, self.argv = settings, argv
        self.worker = 0
        self.exit_code: int | None = None
        self._asked_to_end = self._asked_to_kill = False
        self._environment: dict[str, str] = dict(os.environ)
        self._held: int | None = None
        self._looked, self._stopped = 0.0, dict[int, float]()
        """When stopped processes were looked for, and since when those that were found are known."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self._orphaned():
            return 0
        if self.settings.environment >= 0:
            with open(self.settings.environment, encoding="utf-8") as file:
                self._environment = json.load(file)
        if not self._hold():
            say(f"{self.settings.hold} is held by another process")
            return 1
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self.worker = self._spawn()
        self._keep()
        self._end_leftovers()
        if self.settings.remove and self._orphaned():  # else it is the launcher's, who may start another one
            shutil.rmtree(self.settings.remove, ignore_errors=True)
        assert self.exit_code is not None
        return self.exit_code

    def _orphaned(self) -> bool:
        return os.getppid() != self.settings.parent

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        # Assigned only where it becomes true: one handler may interrupt another.
        if number == signal.SIGTERM:
            self._asked_to_end = True
        elif number == signal.SIGINT:
            self._asked_to_kill = True

    def _hold(self) -> bool:
        """Take the lock that says that this process lives; False if that is not possible."""
        if not self.settings.hold:
            return True
        give_up = time.monotonic() + HOLD_PATIENCE
        while (held := self._open_lock(self.settings.hold, fcntl.LOCK_SH)) is None:
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.01)
        self._held = held
        return True

    def _open_lock(self, path: str, kind: int) -> int | None:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return None
        return handle

    def _spawn(self) -> int:
        keeper, numbers = os.getpid(), (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)
        # One that comes before the worker has its own way with it would run this process's handler in the worker, and
        # be lost: it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return pid
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            os.setpgid(0, 0)
            for number in numbers:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            argv = [*self.settings.under, *self.argv]
            environment = {**self._environment, "COSMOS_PARENT_PID": str(keeper)}
            os.execvpe(argv[0], argv, environment)  # noqa: S606
        except OSError as error:
            say(f"cannot start {argv[0]}: {error.strerror}")
        os._exit(127)

    # ---- while the worker lives ---------------------------------------------------------------------------

    def _keep(self) -> None:
        """Wait for the worker's end, passing on what is asked."""
        deadline: float | None = None
        passed_on = False
        while not self._reap():
            if self._orphaned():
                self._asked_to_end = True
            if self._asked_to_kill or (deadline is not None and time.monotonic() >= deadline):
                if deadline is not None and not self._asked_to_kill:
                    say(f"no orderly end within {self.settings.grace:g} s: killing it")
                self._kill_tree()
            elif self._asked_to_end and deadline is None:
                if self._orphaned() and not self._users_gone():
                    continue
                deadline = time.monotonic() + self.settings.grace
            pause = POLL if deadline is None else min(POLL, max(0.0, deadline - time.monotonic()))
            if deadline is not None and not passed_on:
                passed_on = self._ask_to_end()
            self._continue_stopped(0.0 if passed_on else self.settings.stopped)
            self._sleep(pause if deadline is None or passed_on else min(pause, LOOK))

    def _ask_to_end(self) -> bool:
        """SIGTERM to the worker. False: a profiler has not started it yet, or is writing its report by now."""
        worker = running(os.getpid(), self.argv) if self.settings.under else self.worker
        if worker is not None:
            self._signal(worker, signal.SIGTERM)
        return worker is not None

    def _continue_stopped(self, patience: float) -> None:
        """Continue processes that have been stopped for `patience` seconds."""
        now = time.monotonic()
        if patience and now - self._looked < min(LOOK_AT_STOPPED, patience / 4):
            return
        self._looked = now
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped(os.getpid())}
        for pid in [pid for pid, since in self._stopped.items() if now - since >= patience]:
            say(f"process {pid} was stopped (SIGSTOP): continuing it")
            self._signal(pid, signal.SIGCONT)

    def _users_gone(self) -> bool:
        """Wait, at most `grace` seconds, for the processes that use this one. False: ended or killed meanwhile."""
        if not self.settings.after:
            return True
        give_up = time.monotonic() + self.settings.grace
        while time.monotonic() < give_up:
            lock = self._open_lock(self.settings.after, fcntl.LOCK_EX)
            if lock is not None:
                os.close(lock)
                return True
            self._sleep(0.05)
            if self._asked_to_kill or self._reap():
                return False
        return True

    def _sleep(self, seconds: float) -> None:
        if select.select([self._wake_read], [], [], seconds)[0]:
            try:
                os.read(self._wake_read, 4096)
            except BlockingIOError:
                return

    def _reap(self) -> bool:
        """Collect ended children, adopted ones too; True once the worker has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.worker:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = 128 - code if code < 0 else code
        return self.exit_code is not None

    # ---- afterwards ---------------------------------------------------------------------------------------

    def _end_leftovers(self) -> None:
        give_up = time.monotonic() + (0.0 if self._asked_to_kill else LEFTOVER_GRACE)
        while (leftovers := descendants(os.getpid())) and time.monotonic() < give_up and not self._asked_to_kill:
            self._sleep(0.02)
            self._reap()
        if leftovers:
            say(f"ending {len(leftovers)} processes that {Path(self.argv[0]).name} left behind")
            self._kill_tree()

    def _kill_tree(self) -> None:
        """SIGKILL to everything below, again until nothing is left: a process may fork while we look."""
        give_up = time.monotonic() + KILL_TIMEOUT
        while time.monotonic() < give_up:
            if self.exit_code is None:
                self._signal(-self.worker, signal.SIGKILL)
                self._signal(self.worker, signal.SIGKILL)
            remaining = descendants(os.getpid())
            for pid in remaining:
                self._signal(pid, signal.SIGKILL)
            if self._reap() and not remaining:
                return
            self._sleep(0.01)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            return


def say(text: str) -> None:
    """One line into the log of the process."""
    sys.stderr.write(f"keeper: {text}\n")
    sys.stderr.flush()


def main() -> NoReturn:
    """`keeper.py SETTINGS ARGV…`"""
    sys.exit(Keeper(KeeperSettings.from_json(sys.argv[1]), sys.argv[2:]).run())


if __name__ == "__main__":
    main()
