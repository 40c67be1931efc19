"""Ports for servers that are started a moment after their port was chosen, or again on the same one."""

from __future__ import annotations

import socket
from random import SystemRandom

FIRST, LAST = 10_000, 32_767
"""Below what Linux and macOS hand out by themselves: no connection of another test can be given such a port in the
time between the choice and its use, nor while its server is down."""


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens."""
    dice = SystemRandom()
    for _ in range(1000):
        port = dice.randint(FIRST, LAST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no port between {FIRST} and {LAST} is free")
