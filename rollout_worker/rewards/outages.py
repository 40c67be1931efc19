"""Which failures of a reward may pass by themselves: time-outs and connection errors, of whatever library.

A reward process imports nothing but what the functions do, so the classes of HTTP libraries are known by name.
"""

from __future__ import annotations

import errno
import socket

BUILT_IN = (TimeoutError, ConnectionError, socket.gaierror, socket.herror)
NETWORK_ERRNO = frozenset(
    {
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT, errno.ENETDOWN,
        errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN,
    }
)  # fmt: skip
LIBRARIES = frozenset(
    {
        "ConnectionError", "Timeout", "ChunkedEncodingError",  # requests
        "TimeoutException", "NetworkError", "ProxyError", "RemoteProtocolError",  # httpx
        "TimeoutError", "MaxRetryError", "NewConnectionError", "ProtocolError",  # urllib3
        "ClientConnectionError", "ServerTimeoutError", "ClientPayloadError",  # aiohttp
        "APIConnectionError", "APITimeoutError",  # clients of model services
    }
)  # fmt: skip
MOST_CAUSES = 8


def is_outage(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, is a time-out or a connection error."""
    for _ in range(MOST_CAUSES):
        if error is None:
            return False
        names = {kind.__name__ for kind in type(error).__mro__}
        by_number = isinstance(error, OSError) and error.errno in NETWORK_ERRNO
        if isinstance(error, BUILT_IN) or by_number or names & LIBRARIES:
            return True
        reason = getattr(error, "reason", None)  # of urllib.error.URLError
        error = error.__cause__ or (reason if isinstance(reason, BaseException) else None)
    return False
