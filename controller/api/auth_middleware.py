"""The door of the API: who has no token, or sends a head of absurd size, gets no further.

    Guard ─▶ BodyLimit ─▶ routes (each asks for the roles that it serves)

Behind the guard there is always a caller with a role, whatever the path, so nobody without a token learns which
paths, parameters or jobs there are. Health is for everybody.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from controller.services.auth import CALLER, Tokens
from controller.services.errors import ProblemError, problem
from schema.wire.messages import ErrorCode

OPEN = frozenset({"/healthz", "/readyz"})
MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 * 1024
"""All headers and the address together; the longest of ours asks for the rows of a batch one by one."""


class Guard:
    """ASGI middleware: 431 for heads above the limits, 401 without a valid token."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # nothing else is spoken here: uvicorn closes the connection
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers) + len(scope.get("query_string", b""))
        if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            detail = (
                f"at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of headers and address are read"
            )
            await problem(ErrorCode.TOO_LARGE, detail, status=431)(scope, receive, send)
            return
        if scope["path"] not in OPEN:
            given = next((value for name, value in headers if name == b"authorization"), None)
            try:
                scope[CALLER] = self._tokens.caller(None if given is None else given.decode("latin-1"))
            except ProblemError as error:
                await problem(error.code, error.detail, headers=error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)
