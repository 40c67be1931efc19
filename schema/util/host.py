"""The machine that this process runs on."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def boot_id() -> str:
    """Differs after each start of the kernel; "" where the system has none (not Linux)."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_address(name: str) -> bool:
    """Whether a name or number is an address of this machine: one can listen there. Raises `OSError` if it is not
    known."""
    for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
