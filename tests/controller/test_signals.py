from __future__ import annotations

import asyncio

from controller.signals import Signal


def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    async def scenario() -> None:
        signal = Signal()
        seen = signal.generation
        signal.notify()
        await asyncio.wait_for(signal.wait(seen, 60.0), 10.0)

    asyncio.run(scenario())


def test_all_waiters_wake_up() -> None:
    async def scenario() -> None:
        signal = Signal()
        waiters = [asyncio.create_task(signal.wait(signal.generation, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.wait_for(asyncio.gather(*waiters), 10.0)

    asyncio.run(scenario())


def test_without_a_change_the_wait_ends_by_itself() -> None:
    async def scenario() -> None:
        signal = Signal()
        await asyncio.wait_for(signal.wait(signal.generation, 0.01), 10.0)
        assert signal.generation == 0

    asyncio.run(scenario())
