"""Where a trainer listens for replicas: the address of this machine on the way to the controller.

Whoever reaches the controller reaches the trainer by it in most networks, and nothing needs to be configured. On the
controller's own machine that way is the loopback; then it is the address of the way out, unless the controller itself
listens at the loopback alone, so that all replicas are on this machine.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_ELSEWHERE = "192.0.2.1"
"""Reserved for documentation: asking for the way there sends nothing."""


def own_address(controller_url: str, controller_host: str) -> str:
    """The address to listen at.

    Args:
        controller_url: as this machine reaches the controller.
        controller_host: at which the controller listens (`controller.host`).

    Raises `OSError` when there is no way to the controller, or its name is not known.
    """
    parts = urlsplit(controller_url)
    found = _towards(parts.hostname or "localhost", parts.port or 80)
    if _is_loopback(found) and not _is_loopback(controller_host):
        try:
            return _towards(_ELSEWHERE, 80)
        except OSError:  # a machine without a network
            return found
    return found


def _towards(host: str, port: int) -> str:
    """This machine's address on the way to another."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return str(way.getsockname()[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
