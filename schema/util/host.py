"""The machine that this process runs on."""

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
