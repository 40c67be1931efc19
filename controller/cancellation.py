"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

AGAIN_SECONDS = 0.5


async def end(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all of them have ended; their results and errors are dropped.

    Once is not enough: `asyncio.wait_for` of Python 3.11, through which redis-py sends, may return the result of
    what it waited for although its task was cancelled in the same round, and the task goes on.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()  # else the loop would complain that it was never retrieved
