"""The client of the controller, for workers, launcher, tests and users' scripts: what other packages may import.

    from controller.client import AsyncClient, calls as api

    client = AsyncClient(url, token)
    reply = await client.send(api.lease(LeaseRequest(...)))

A token goes only to a controller that has proven itself, by a certificate (https://) or by the token (http://). What
listens at its address without either gets nothing and counts as a failed attempt, since a controller whose port was
taken over may come back.

Every call has a time-out. Lost connections, time-outs, 408 and 503 are retried with jittered back-off for up to
`patience` seconds (all calls are idempotent), since a controller that died comes back. Everything else raises:

    ControllerError
    ├── ControllerLost      no answer for `patience` seconds
    │   └── NotServing      it answers, and says why it cannot serve now: without Redis, or standing by
    ├── Unusable            no address of a controller, or no token, at the construction of a client
    ├── Untrusted           the certificate is not trusted, or a process of this machine passes calls on: nothing
    │                       was sent
    ├── Unauthorized        the token is missing, wrong, or of another role
    │   └── UnknownToken    the controller there does not have this token, which was not sent
    └── Refused             any other problem answer; `.code` says which, `.detail` what to do
"""

from __future__ import annotations

from controller.client import calls
from controller.client.calls import Answer, Call
from controller.client.http import (
    AsyncClient,
    Client,
    ControllerError,
    ControllerLost,
    NotServing,
    Refused,
    Unauthorized,
    UnknownToken,
    Untrusted,
    Unusable,
)  # fmt: skip

__all__ = [
    "Answer", "AsyncClient", "Call", "Client", "ControllerError", "ControllerLost", "NotServing", "Refused",
    "Unauthorized", "UnknownToken", "Untrusted", "Unusable", "calls",
]  # fmt: skip
