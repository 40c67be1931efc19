"""Long-polls without busy loops: a counter that waiters sleep on until it moves."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class ChangeSignal:
    """Something changed that waiters may care about.

    Read `generation` before looking at the state, and hand it to `wait`: a change in between ends the wait at
    once, so none is missed however many awaits lie between looking and waiting.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._waiters: dict[asyncio.Future[None], None] = {}
        """In the order in which they came, which is the one in which they go on."""

    def notify(self) -> None:
        self.generation += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self, seen: int, timeout: float) -> None:
        """Return when `generation` differs from `seen`, or after `timeout` seconds."""
        if self.generation != seen or timeout <= 0:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            with suppress(TimeoutError):
                # `wait_for` forgets a cancellation that meets a notification.
                async with asyncio.timeout(timeout):
                    await waiter
        finally:
            self._waiters.pop(waiter, None)
