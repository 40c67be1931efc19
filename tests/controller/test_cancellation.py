"""Tasks end, however often they forget that they were asked to."""

from __future__ import annotations

import asyncio

from controller.cancellation import end
from tests.controller.conftest import in_event_loop


@in_event_loop
async def test_who_forgets_a_cancellation_is_asked_again() -> None:
    async def forgetful(times: int) -> None:
        while True:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                times -= 1
                if times < 0:
                    raise

    tasks = [asyncio.create_task(forgetful(times)) for times in range(3)]
    await asyncio.sleep(0)
    await end(tasks)
    assert [task.cancelled() for task in tasks] == [True, True, True]


@in_event_loop
async def test_what_has_ended_or_fails_is_nobodys_trouble() -> None:
    async def fail() -> None:
        try:
            await asyncio.sleep(3600.0)
        finally:
            raise ValueError("while it was cancelled")

    failing = asyncio.create_task(fail())
    over = asyncio.create_task(asyncio.sleep(0))
    await asyncio.sleep(0)
    await end([failing, over])
    assert isinstance(failing.exception(), ValueError)
    await end([])
