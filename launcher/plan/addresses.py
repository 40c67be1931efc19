"""Addresses of the controller, for this machine and for others, and ports on which nobody listens."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.plan.machine import Machine
from schema.config import Config

LOOPBACK = "127.0.0.1"
FIRST_PORT, ATTEMPTS = 10_000, 100
"""The lowest port that is chosen, and how many are tried before the system chooses one."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - where to reach such a listener


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a job. host, port: where its controller listens. url: the address that its processes get.

    address: that of this machine, for the others. others: all machines but this one.
    """

    host: str
    port: int
    url: str
    address: str = LOOPBACK
    others: Sequence[Machine] = ()

    @classmethod
    def here(cls, config: Config) -> Site:
        """This machine alone. Raises OSError: `controller.host` is not an address of it."""
        port = config.controller.port or free_port(reachable_host(config))
        return cls(config.controller.host, port, controller_url(config, port))


def reachable_host(config: Config) -> str:
    """The host by which processes of this machine reach the controller."""
    return ANY_ADDRESS.get(config.controller.host, config.controller.host)


def controller_url(config: Config, port: int | str) -> str:
    """The address of the controller for processes of this machine."""
    return url_of(config, reachable_host(config), port)


def reachable_elsewhere(config: Config) -> str:
    """The host by which other machines reach the controller, as far as its name is known here; the local one
    where only that reaches it."""
    host = config.controller.host
    return socket.gethostname() if host in ANY_ADDRESS else host


def url_of(config: Config, host: str, port: int | str) -> str:
    """The controller's URL at a host."""
    return f"{config.controller.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def free_port(host: str) -> int:
    """A port on which nobody listens on `host`. Raises OSError: it is not an address of this machine.

    It lies below those that the system gives to connections, where there is room: one of those may be given away in
    the seconds until its server starts, or while that is down.
    """
    end = _first_of_connections()
    for _ in range(ATTEMPTS if end > FIRST_PORT else 0):
        with suppress(OSError):
            return _bound(host, random.SystemRandom().randrange(FIRST_PORT, end))
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _first_of_connections() -> int:
    """The first port that the system gives to connections; 0: not known."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
