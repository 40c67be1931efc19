"""What a job leaves in the system: processes, ports, shared memory, files. Linux only, by /proc.

A job is started with TMPDIR set to a folder of its own, which all its processes inherit: so each of them can be told
by its environment, whoever its parent is by now, and every temporary file of theirs lies in that folder. A program
that overwrites its environment (Valkey sets a title) is told by its directory or its arguments.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.plan import Role
from tests.support.waiting import PATIENCE

PROC = Path("/proc")
SHM = Path("/dev/shm")
MODULES: dict[str, Role] = {
    "controller": "controller",
    "controller.data.prepare": "data",
    "rollout_worker": "rollout",
    "policy_worker": "policy",
    "rollout_worker.rewards.process": "reward",
    "launcher.trackers": "trackers",
}
HIDDEN = {".tokens", ".locks", ".metadata"}
"""Names beginning with a dot that belong into a run directory; all others are something half-written."""
CACHES = ("torchinductor_",)
"""What libraries keep in the temporary directory on purpose, for the next process of the same user."""
UNFINISHED = (".tmp", ".partial", ".part", ".incomplete")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the job. `role` is None for the launcher, keepers and what workers start for themselves."""

    pid: int
    parent: int
    argv: tuple[str, ...]
    role: Role | None

    def __str__(self) -> str:
        return f"{self.pid} ({' '.join(self.argv)[:160]})"


@dataclass
class Traces:
    """Everything seen of one job in `folder`, which is its TMPDIR's and its run directory's parent."""

    folder: Path
    shared: set[Path] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    sockets: dict[str, int] = field(default_factory=dict)
    """Inode and port of every socket on which a process of the job listened."""

    def look(self) -> list[Process]:
        """The job's living processes; remembers them, and what they share. Costly: it reads all that they map."""
        found = self.alive()
        self.pids |= {process.pid for process in found}
        for process in found:
            self.shared |= _shared_memory(process.pid)
        self.sockets |= _listening(found)
        return found

    def alive(self) -> list[Process]:
        """The job's living processes, the first one started first."""
        return sorted(self._processes(), key=lambda process: process.pid)

    def _processes(self) -> Iterator[Process]:
        mark = os.fsencode(self.folder)
        for pid in _pids():
            if pid == os.getpid():
                continue
            try:
                stat = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                argv = (PROC / str(pid) / "cmdline").read_bytes()
                if stat[0] in "ZX" or not argv or not (mark in argv or _is_marked(pid, mark)):
                    continue
            except (OSError, IndexError):
                continue
            words = tuple(os.fsdecode(word) for word in argv.rstrip(b"\0").split(b"\0"))
            yield Process(pid, int(stat[1]), words, role_of(words))

    # ---- at the end ---------------------------------------------------------------------------------------

    def left_behind(self, run_dir: Path, patience: float = PATIENCE) -> list[str]:
        """Violations: what of this job is still there although the launcher has ended."""
        give_up = time.monotonic() + patience
        while (alive := self.alive()) and time.monotonic() < give_up:
            time.sleep(0.1)
        found = [f"process {process} outlived the job" for process in alive]
        found += [f"port {self.sockets[inode]} is listened on" for inode in self.sockets.keys() & _listeners().keys()]
        found += [f"shared memory {path} was left" for path in sorted(self.shared) if path.exists()]
        found += [f"System V shared memory {key} was left" for key, creator in _ipc() if creator in self.pids]
        temporary = sorted(path for path in (self.folder / "tmp").iterdir() if not path.name.startswith(CACHES))
        found += [f"temporary file {path} was left" for path in temporary]
        return found + [f"{path} was left" for path in strays(run_dir)]


def role_of(argv: tuple[str, ...]) -> Role | None:
    """What a process is by its arguments. A keeper carries those of its process: it is none itself."""
    if is_keeper(argv):
        return None
    if "-m" in argv[:4]:
        return MODULES.get(argv[argv.index("-m") + 1])
    if argv[0].startswith("VLLM"):
        return "engine"
    return "redis" if "valkey-server" in argv[0] else None


def is_keeper(argv: tuple[str, ...]) -> bool:
    return any(word.endswith("launcher/processes/keeper.py") for word in argv[:5])


def kill(process: Process, number: signal.Signals = signal.SIGKILL) -> bool:
    """A signal to exactly this process; False if it is gone, whoever may have its number now."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        argv = (PROC / str(process.pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        if tuple(os.fsdecode(word) for word in argv) != process.argv:
            return False
        signal.pidfd_send_signal(handle, number)
    except (OSError, ProcessLookupError):
        return False
    finally:
        os.close(handle)
    return True


def strays(run_dir: Path) -> list[Path]:
    """Files and folders of a run that somebody has begun and nobody finished."""
    found = []
    for folder, folders, files in os.walk(run_dir):
        for name in [*folders, *files]:
            half = name.startswith(".") and name not in HIDDEN
            if half or name.endswith(UNFINISHED) or name.startswith("temp-"):
                found.append(Path(folder, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        if mark in (PROC / str(pid) / "environ").read_bytes():
            return True
    except OSError:
        return False
    try:
        return os.fsencode(os.readlink(PROC / str(pid) / "cwd")).startswith(mark)
    except OSError:
        return False


def _shared_memory(pid: int) -> set[Path]:
    """POSIX shared memory and semaphores that a process has mapped."""
    try:
        lines = (PROC / str(pid) / "maps").read_text().splitlines()
    except OSError:
        return set()
    return {
        Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line
    }


def _ipc() -> Iterator[tuple[str, int]]:
    """Key and creator of each System V segment."""
    try:
        header, *rows = (PROC / "sysvipc" / "shm").read_text().splitlines()
    except (OSError, ValueError):
        return
    columns = header.split()
    for row in rows:
        values = dict(zip(columns, row.split(), strict=False))
        yield values["shmid"], int(values["cpid"])


def _listening(processes: list[Process]) -> dict[str, int]:
    """Inode and port of the TCP sockets on which these processes listen."""
    inodes = set()
    for process in processes:
        try:
            handles = list((PROC / str(process.pid) / "fd").iterdir())
        except OSError:
            continue
        for handle in handles:
            try:
                target = os.readlink(handle)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return {inode: port for inode, port in _listeners().items() if inode in inodes}


def _listeners() -> dict[str, int]:
    """Inode and port of every listening TCP socket of this machine."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in (PROC / "net" / table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A":
                found[columns[9]] = int(columns[1].rpartition(":")[2], 16)
    return found
