"""The gate decides what a controller answers before it is in charge of its job.

    started ──▶ standing by (another one is in charge) ──▶ serving
        └────────────────────────────────────────────────────▲

`/healthz` and `/v1/proof` answer from the first moment on: a client sends its token to a controller that stands by,
too. Everything else is 503 with the code `standby`, with Retry-After where another one serves: a client that knows
several addresses tries the next one.
"""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.api.auth import OPEN, PROVER, JobTokens
from controller.api.routes import proof
from controller.errors import ApiError
from controller.services.errors import problem, refusal
from controller.store import LockHolder, StateStore
from schema.wire.messages import ErrorCode
from schema.wire.messages.proof import PATH as PROOF

log = logging.getLogger(__name__)

RETRY_AFTER = {"retry-after": "1"}


class FrontDoor:
    """The ASGI application of the process: what it is behind the door changes once, by `open`."""

    def __init__(self, tokens: JobTokens) -> None:
        self._prover = tokens.prover
        self._app: ASGIApp | None = None
        self._why = "the controller is starting"
        self._seen = ""

    def stand_by(self, holder: LockHolder) -> None:
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
            await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        if scope["path"] == "/healthz":
            return Response("ok\n", media_type="text/plain")
        if scope["path"] == PROOF and scope["method"] == "GET":
            scope[PROVER] = self._prover
            try:
                return proof.answer(Request(scope))
            except ApiError as error:
                return refusal(error)
        return problem(ErrorCode.STANDBY, self._why, headers=RETRY_AFTER if self._seen else None)


class LeaderGate:
    """ASGI middleware: calls are only answered while this controller is in charge for certain.

    Stands before all else, so that a process that was suspended reads no body and shows no memory when it wakes.
    """

    def __init__(self, app: ASGIApp, store: StateStore) -> None:
        self._app, self._store = app, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if not path.startswith("/v1/") or path in OPEN or self._store.in_charge:
            await self._app(scope, receive, send)
            return
        detail = "this controller could not renew its lock in Redis in time and may not be in charge any more: " + (
            self._store.outage or "it waits for an answer of Redis"
        )
        await problem(ErrorCode.STANDBY, detail, headers=RETRY_AFTER)(scope, receive, send)
