"""Whether the kernel has killed for lack of memory, by its own counters."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
LOOK_EVERY = 10.0
"""Seconds between looks at the counters, each a few short files."""
LOOKS = 4
"""How many are kept. So a kill explains what ends within 40 s: an engine's worker outlives it by its own shutdown."""

BY_LIMIT = "killed by the kernel: the memory limit of its control group was reached"
BY_OTHERS = "killed by the kernel: the machine, or a control group above its own, ran out of memory"
PROBABLY = "killed, probably by the kernel: the machine ran out of memory meanwhile"
_NO_LIMIT = 1 << 60
"""Bytes: version 1 writes "no limit" as a huge number."""


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """How often the kernel has killed for lack of memory so far; None where the system does not tell.

    group: processes of our control group, whatever made the kernel kill them (memory.events; memory.oom_control in
    version 1). limit: how often the group's own limit did (`oom`; version 1 has no such counter: each kill in a
    group that has a limit). machine: all processes of the machine (/proc/vmstat).
    """

    group: int | None
    limit: int
    machine: int | None

    @classmethod
    def read(cls) -> MemoryKills:
        machine = _counters(ROOT / "proc/vmstat").get("oom_kill")
        for version, folder in _groups():
            counters = _counters(folder / ("memory.oom_control" if version == 1 else "memory.events"))
            if "oom_kill" in counters:
                group = counters["oom_kill"]
                limit = counters.get("oom", 0) if version == 2 else group * _is_limited(folder)
                return cls(group, limit, machine)
        return cls(None, 0, machine)

    def cause(self, now: MemoryKills) -> str:
        """Why a process was killed between these counters and those of `now`; empty: not for memory."""
        if self.group is not None and now.group is not None:
            if now.group <= self.group:
                return ""
            return BY_LIMIT if now.limit > self.limit else BY_OTHERS
        if self.machine is not None and now.machine is not None and now.machine > self.machine:
            return PROBABLY
        return ""


class RecentKills:
    """It counts what the kernel has killed for memory in the last half minute, not before this was made."""

    def __init__(self) -> None:
        self._looks = deque([MemoryKills.read()], maxlen=LOOKS)
        self._looked_at = time.monotonic()

    def look(self) -> None:
        """To be called every now and then; most calls do nothing."""
        if time.monotonic() - self._looked_at >= LOOK_EVERY:
            self._looked_at = time.monotonic()
            self._looks.append(MemoryKills.read())

    def cause(self) -> str:
        """Why a process that was just killed was; empty: not for memory."""
        return self._looks[0].cause(MemoryKills.read())


def _groups() -> list[tuple[int, Path]]:
    """Return the candidate paths of this process's control group, each with the version of cgroups."""
    try:
        fields = [line.split(":", 2) for line in (ROOT / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    paths = {field[1]: field[2].lstrip("/") for field in fields if len(field) == 3}
    mounted = ROOT / "sys/fs/cgroup"
    # In a container the path is that of the host, and its own group is mounted at the root.
    v1_groups = [(1, mounted / "memory" / path) for path in (paths.get("memory"), "") if path is not None]
    return v1_groups + [(2, mounted / path) for path in (paths.get(""), "") if path is not None]


def _is_limited(folder: Path) -> bool:
    try:
        return int((folder / "memory.limit_in_bytes").read_text()) < _NO_LIMIT
    except (OSError, ValueError):
        return False


def _counters(path: Path) -> dict[str, int]:
    """A file of lines `name number`; empty where it cannot be read."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
