"""Waiting for the processes of a machine, or for a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

POLL = 0.5
"""Seconds between two looks while something is waited for."""


async def attended(
    work: Coroutine[Any, Any, Any],
    interrupts: asyncio.Queue[int],
    look: Callable[[], Any] = bool,
    every: float = POLL,
) -> int | None:
    """Wait until `work` is done or a signal arrives; the signal, or None.

    look: is called every so many seconds; something true ends the wait. Unfinished work is cancelled.
    """
    waits = awaited, signalled = asyncio.create_task(work), asyncio.create_task(interrupts.get())
    try:
        while not (awaited.done() or signalled.done()):
            await asyncio.wait(waits, timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if look():
                break
        return signalled.result() if signalled.done() else None
    finally:
        for task in waits:
            task.cancel()
