"""Whether the kernel has killed a process for lack of memory: its counters, before and after.

The counter of our control group (v2: memory.events, v1: memory.oom_control) counts what its limit cost; that of the
machine (/proc/vmstat) counts every such kill, also of processes that are not ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CERTAIN = "killed by the kernel: the memory limit of its control group was reached"
LIKELY = "killed, probably by the kernel: the machine ran out of memory meanwhile"


@dataclass(frozen=True, slots=True)
class Counters:
    """Kills so far; None where the system does not tell."""

    group: int | None
    machine: int | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> Counters:
        return cls(_of_group(root), _value(root / "proc/vmstat", "oom_kill"))

    def cause(self, now: Counters) -> str:
        """Why a process was killed between these counters and those of `now`; empty: not for memory."""
        if self.group is not None and now.group is not None and now.group > self.group:
            return CERTAIN
        if self.machine is not None and now.machine is not None and now.machine > self.machine:
            return LIKELY
        return ""


def _of_group(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {
        line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2
    }
    mounted = root / "sys/fs/cgroup"
    places = [(mounted / "memory", "memory.oom_control", paths.get("memory"))]
    places.append((mounted, "memory.events", paths.get("")))
    for base, name, path in places:
        # In a container the path is that of the host, and its own group is mounted at the root.
        for folder in () if path is None else (base / path, base):
            found = _value(folder / name, "oom_kill")
            if found is not None:
                return found
    return None


def _value(path: Path, key: str) -> int | None:
    """The number behind `key` in a file of lines `key number`."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.strip().isdecimal():
                return int(value)
    except OSError:
        return None
    return None
