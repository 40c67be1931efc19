"""The limits say what request bodies may cost, in bytes and in time.

    announced above max_request_bytes          ─▶ 413      no share left, or Redis has too much to write ─▶ 503,
    no byte for BODY_STALL seconds             ─▶ 408                                               Retry-After
    longer than BODY_GRACE + size / BODY_RATE  ─▶ 408

What counts is what has arrived, never what was announced: a body is charged for each byte beyond its first
SMALL_BODY as it comes, until its call is answered. A body that would not fit is refused before a byte is read, one
that stops fitting in the middle is refused there. Rollout replicas share three quarters of max_buffered_bytes,
trainers and users the rest, so neither can take the room of the other, and the calls that keep a job going
(heartbeats, leases, commits) are small and need no room at all.

Invariant, for each share: the bytes charged are at most the share, or they are those of one body. So no request is
too large for its share that is not too large for itself, and of several at least one always goes on. With
L = max_buffered_bytes, R = max_request_bytes and C connections (`controller.api.connections`; one call each), bodies
hold

    max(3/4 L, R) + max(1/4 L, R)   charged        + C · SMALL_BODY   not charged
                                                   + C · 320 KiB      read ahead by uvicorn (64 KiB and one read)

and a body lasts at most 30 s + R / (1 MiB/s): with the defaults less than five minutes.

Payloads of calls that were given up while Redis is slow are below L again: above it large bodies of rollout replicas
are refused here, small ones in `controller.services.leases`. Nothing else makes that backlog grow: heartbeats,
leases and commits write rows, which replace each other while they wait, so they are let in as long as Redis answers
at all.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.api.auth import CALLER
from controller.errors import ApiError
from controller.services.errors import refusal
from controller.store import StateStore
from schema.wire.messages import ErrorCode

SMALL_BODY = 64 * 1024
"""Bytes of each body that no share is charged for: more than a lease, a commit, or a heartbeat with a thousand
leases has."""
MAX_DISCARD = 1024 * 1024 * 1024
"""Bytes of a refused body that are read and thrown away, so that its sender gets to read the answer."""
BODY_STALL = 30.0
"""Seconds without a byte after which a body is given up: longer than any pause of a network that works."""
BODY_GRACE = 30.0
BODY_RATE = 1024 * 1024
"""Seconds that any body may take, and bytes per second beyond them: slower than any link a job can work with."""


class BodyBudget:
    """Bytes that all bodies of one share may hold. Pure, see the module's docstring."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def fits(self, n: int, own_bytes: int = 0) -> bool:
        """Whether a body that is charged `own_bytes` already may take `n` bytes more."""
        return n <= 0 or self.used == own_bytes or self.used + n <= self.limit

    def take(self, n: int, own_bytes: int = 0) -> bool:
        """Take bytes, if they fit; return whether they did."""
        if not self.fits(n, own_bytes):
            return False
        self.used += n
        return True

    def give(self, n: int) -> None:
        """Give back what was taken."""
        self.used -= n


class BodyLimit:
    """ASGI middleware, see the module's docstring."""

    def __init__(
        self,
        app: ASGIApp,
        store: StateStore,
        limit: int,
        buffered: int,
        *,
        small: int = SMALL_BODY,
        stall: float = BODY_STALL,
        grace: float = BODY_GRACE,
        rate: float = BODY_RATE,
    ) -> None:
        self._app, self._store, self._buffered = app, store, buffered
        self.limit, self.small, self.stall, self.grace, self.rate = limit, small, stall, grace, rate
        self.kept = BodyBudget(buffered // 4)
        """The share of trainers and users."""
        self.budget = BodyBudget(buffered - buffered // 4)
        """The share of everybody else."""
        self.too_large = f"the body is larger than controller.max_request_bytes = {limit}: send less at once"
        self.busy = (
            f"bodies hold their share of controller.max_buffered_bytes = {buffered}: "
            "some are being read, others wait for Redis"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        announced = headers.get(b"content-length", b"0")
        size = int(announced) if announced.isdigit() else self.limit + 1
        if not size and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        caller = scope.get(CALLER)
        budget = self.kept if caller in ("policy", "user") else self.budget
        body = _Body(self, budget, receive, size)
        large = size - self.small
        try:
            if size > self.limit:
                await body.discard()
                raise ApiError(ErrorCode.TOO_LARGE, self.too_large)
            slow = caller == "rollout" and large > 0 and self._store.backlog_bytes > self._buffered
            if slow or not budget.fits(large):
                raise ApiError(ErrorCode.BUSY, self.busy, retry_after=1)
        except ApiError as error:
            await refusal(error)(scope, receive, send)
            return
        try:
            await self._app(scope, body.receive, send)
        finally:
            budget.give(body.charged)


class _Body:
    """One body on its way in."""

    def __init__(self, limits: BodyLimit, budget: BodyBudget, receive: Receive, announced: int) -> None:
        self._limits, self._budget, self._receive = limits, budget, receive
        self._announced = announced
        self._began = asyncio.get_running_loop().time()
        self.charged = 0
        self._taken = 0
        self._more = True

    async def receive(self) -> Message:
        """The next part. Raises `ApiError` (408, 413, 503)."""
        if not self._more:  # all of it is here: what can still come is that the caller hangs up
            return await self._receive()
        message = await self._next(max(self._announced, self._taken))
        limits = self._limits
        if self._taken > limits.limit:
            raise ApiError(ErrorCode.TOO_LARGE, limits.too_large)
        owed = self._taken - limits.small - self.charged
        if owed > 0:
            if not self._budget.take(owed, self.charged):
                raise ApiError(ErrorCode.BUSY, limits.busy, retry_after=1)
            self.charged += owed
        return message

    async def discard(self) -> None:
        """Throw away a body that is announced as too large. Raises `ApiError` (408)."""
        while self._more and self._taken <= MAX_DISCARD:
            await self._next(self._taken)

    async def _next(self, size: int) -> Message:
        """The next message, of a body of `size` bytes. Raises `ApiError` (408) when none comes in time."""
        limits = self._limits
        total = limits.grace + size / limits.rate
        left = self._began + total - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(min(limits.stall, left)):
                message = await self._receive()
        except TimeoutError:
            detail = f"no byte of the body came for {limits.stall:g} s"
            if left < limits.stall:
                detail = (
                    f"the body took longer than {total:g} s: {limits.grace:g} s and a second for each "
                    f"{limits.rate:g} bytes"
                )
            raise ApiError(ErrorCode.TOO_SLOW, detail) from None
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        self._taken += len(message.get("body", b""))
        return message
