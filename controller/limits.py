"""What request bodies may cost, decided before a byte of them is read.

    announced above max_request_bytes ─▶ 413        bytes of all bodies above max_buffered_bytes ─▶ 503, Retry-After
    no byte for BODY_STALL seconds    ─▶ 408        Redis too slow, as many bytes wait for it    ─▶ 503, Retry-After

A body counts from the moment it is announced until its call is answered, so all that a controller holds for its
callers is below max_buffered_bytes, and what waits for Redis after their calls were given up is below it again.
A single body is always let in: no request can be too large for the sum that is not too large for itself.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.problems import ProblemError, problem
from controller.store import StateStore
from schema.wire.messages import ErrorCode

MAX_DISCARD = 1024 * 1024 * 1024
"""Bytes of a refused body that are read and thrown away, so that its sender gets to read the answer."""
BODY_STALL = 30.0
"""Seconds without a byte after which a body is given up: longer than any pause of a network that works."""
RETRY_AFTER = {"retry-after": "1"}


class Budget:
    """Bytes that all calls together may hold. Pure: `take` and `give` never wait."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self, n: int) -> bool:
        """Whether `n` more bytes fit; then they are taken."""
        if self.used and self.used + n > self.limit:
            return False
        self.used += n
        return True

    def give(self, n: int) -> None:
        """Give back what was taken."""
        self.used -= n


class BodyLimit:
    """ASGI middleware, see the module's docstring."""

    def __init__(
        self, app: ASGIApp, store: StateStore, limit: int, buffered: int, stall: float = BODY_STALL
    ) -> None:
        self._app, self._store, self._limit, self._stall = app, store, limit, stall
        self.budget = Budget(buffered)
        self._too_large = f"the body is larger than controller.max_request_bytes = {limit}: send less at once"
        self._busy = (
            f"bodies of more than controller.max_buffered_bytes = {buffered} bytes in all would be held: "
            "some are being read, others wait for Redis"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        announced = headers.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self._limit:
            await (await self._refusal(receive))(scope, receive, send)
            return
        size = int(announced)
        if not size and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        if self._store.backlog_bytes > self.budget.limit or not self.budget.take(size):
            await problem(ErrorCode.BUSY, self._busy, headers=RETRY_AFTER)(scope, receive, send)
            return
        body = _Body(self, receive, size)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self.budget.give(body.counted)

    async def _refusal(self, receive: Receive) -> Response:
        """The answer to a body that is announced as too large, once it has been thrown away."""
        try:
            await self._discard(receive)
        except ProblemError as error:
            return problem(error.code, error.detail, headers=error.headers)
        return problem(ErrorCode.TOO_LARGE, self._too_large)

    async def next_part(self, receive: Receive) -> Message:
        """The next message of a body. Raises `ProblemError` (408) when none comes."""
        try:
            async with asyncio.timeout(self._stall):
                return await receive()
        except TimeoutError:
            detail = f"no byte of the body came for {self._stall:g} s"
            raise ProblemError(ErrorCode.TOO_SLOW, detail, {"connection": "close"}) from None

    async def check(self, taken: int, more: bool, receive: Receive) -> None:
        """Raise `ProblemError` if the `taken` bytes of one body are too many."""
        if taken > self._limit:
            if more:
                await self._discard(receive)
            raise ProblemError(ErrorCode.TOO_LARGE, self._too_large)

    async def refuse(self, more: bool, receive: Receive) -> None:
        """A body without an announced length does not fit any more. Raises `ProblemError` (503)."""
        if more:
            await self._discard(receive)
        raise ProblemError(ErrorCode.BUSY, self._busy, RETRY_AFTER)

    async def _discard(self, receive: Receive) -> None:
        discarded = 0
        while discarded <= MAX_DISCARD:
            message = await self.next_part(receive)
            discarded += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return


class _Body:
    """One body on its way in."""

    def __init__(self, limits: BodyLimit, receive: Receive, announced: int) -> None:
        self._limits, self._receive = limits, receive
        self.counted = announced
        self._taken = 0
        self._more = True

    async def receive(self) -> Message:
        if not self._more:  # all of it is here: what can still come is that the caller hangs up
            return await self._receive()
        message = await self._limits.next_part(self._receive)
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        self._taken += len(message.get("body", b""))
        await self._limits.check(self._taken, self._more, self._receive)
        if self._taken > self.counted:
            if not self._limits.budget.take(self._taken - self.counted):
                await self._limits.refuse(self._more, self._receive)
            self.counted = self._taken
        return message
