"""The size limit of request bodies, enforced before anything is buffered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.problems import problem
from schema.wire.messages import ErrorCode

MAX_DISCARD = 1024 * 1024 * 1024
"""Bytes of a refused body that are read and thrown away, so that its sender gets to read the answer."""


class TooLarge(Exception):
    """A body without announced length went over the limit."""


class BodyLimit:
    """ASGI middleware: 413 for bodies above `limit` bytes, announced or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            await self._refuse(scope, receive, send)
            return
        taken, started = 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except TooLarge:
            if started:
                raise
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        discarded, more = 0, True
        while more and discarded <= MAX_DISCARD:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            discarded += len(message.get("body", b""))
            more = message.get("more_body", False)
        detail = f"the body is larger than controller.max_request_bytes = {self._limit}: send fewer samples at once"
        await problem(ErrorCode.TOO_LARGE, detail)(scope, receive, send)
