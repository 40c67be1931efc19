"""The size limit of request bodies, enforced before anything is buffered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.problems import ProblemError, problem
from schema.wire.messages import ErrorCode

MAX_DISCARD = 1024 * 1024 * 1024
"""Bytes of a refused body that are read and thrown away, so that its sender gets to read the answer."""


class BodyLimit:
    """ASGI middleware: 413 for bodies above `limit` bytes, whether their length is announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit
        self._detail = f"the body is larger than controller.max_request_bytes = {limit}: send less at once"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            await _discard(receive)
            await problem(ErrorCode.TOO_LARGE, self._detail)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                if message.get("more_body", False):
                    await _discard(receive)
                raise ProblemError(ErrorCode.TOO_LARGE, self._detail)
            return message

        await self._app(scope, counted, send)


async def _discard(receive: Receive) -> None:
    discarded = 0
    while discarded <= MAX_DISCARD:
        message = await receive()
        discarded += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            return
