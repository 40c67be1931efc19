"""What a controller answers before it is in charge of its job.

    started ──▶ standing by (another one is in charge) ──▶ serving
        └────────────────────────────────────────────────────▲

`/healthz` answers from the first moment on. Everything else is 503 with the code `standby`, with Retry-After
where another one serves: a client that knows several addresses tries the next one.
"""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.services.errors import problem
from controller.store import Holder, StateStore
from schema.wire.messages import ErrorCode

log = logging.getLogger(__name__)

RETRY_AFTER = {"retry-after": "1"}


class FrontDoor:
    """The ASGI application of the process: what it is behind the door changes once, by `open`."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._why = "the controller is starting"
        self._seen = ""

    def stand_by(self, holder: Holder) -> None:
        """Another controller is in charge."""
        if holder.key != self._seen:
            log.warning("standing by: %s is in charge of this job", holder)
            self._seen = holder.key
        self._why = f"standby: {holder} is in charge of this job; this one takes over when that one ends"

    def open(self, app: ASGIApp) -> None:
        """From now on `app` answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = Response("ok\n", media_type="text/plain")
            if scope["path"] != "/healthz":
                answer = problem(ErrorCode.STANDBY, self._why, headers=RETRY_AFTER if self._seen else None)
            await answer(scope, receive, send)


class LeaderGate:
    """ASGI middleware: calls are only answered while this controller is in charge for certain.

    Stands before all else, so that a process that was suspended reads no body and shows no memory when it wakes.
    """

    def __init__(self, app: ASGIApp, store: StateStore) -> None:
        self._app, self._store = app, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or self._store.in_charge:
            await self._app(scope, receive, send)
            return
        detail = (
            "this controller could not renew its lock in Redis in time and may not be in charge any more: "
            + (self._store.outage or "it waits for an answer of Redis")
        )
        await problem(ErrorCode.STANDBY, detail, headers=RETRY_AFTER)(scope, receive, send)
