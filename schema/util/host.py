"""The machine that this process runs on, and whether the process that started it still lives."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

PROC = Path("/proc")
MAX_SOCKET_PATH = 107
"""Bytes of the path of a unix socket (sun_path)."""
LOOKS = 3
"""A chain in which a process ends while it is read is read again."""


@cache
def boot_id() -> str:
    """Differs after each start of the kernel; "" where the system has none (not Linux)."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_address(name: str) -> bool:
    """Whether a name or number is an address of this machine: one can listen there (anywhere, where the system allows
    it, `net.ipv4.ip_nonlocal_bind`). Raises `OSError` if it is not known."""
    for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def short_directory(suffix_bytes: int) -> Path:
    """Return where directories of sockets are made: the system's temporary directory, or /tmp where its path and
    `suffix_bytes` more exceed the length of a socket's address."""
    chosen = tempfile.gettempdir()
    return Path(chosen if len(os.fsencode(chosen)) + suffix_bytes <= MAX_SOCKET_PATH else "/tmp")  # noqa: S108 - 0700 each


def descends_from(pid: int) -> bool:
    """Whether a process is the parent of this one, or above it: others (a profiler) may stand in between.

    Above all is the first process, to which orphans go: it counts as a parent alone. Without /proc only the parent
    is seen.
    """
    return os.getppid() == pid or any(_is_above(pid) for _ in range(LOOKS))


def _is_above(pid: int) -> bool:
    ancestor = os.getppid()
    while ancestor > 1:
        if ancestor == pid:
            return True
        try:
            fields = (PROC / str(ancestor) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        ancestor = int(fields[1])
    return False


def count_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
