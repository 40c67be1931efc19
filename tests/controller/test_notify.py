"""Waiting for a change: none is missed, and nobody who was asked to end goes on waiting."""

from __future__ import annotations

import asyncio

from controller.notify import ChangeSignal
from tests.controller.conftest import in_event_loop


@in_event_loop
async def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    signal = ChangeSignal()
    seen = signal.generation
    signal.notify()
    await signal.wait(seen, 3600.0)


@in_event_loop
async def test_the_end_of_the_time_is_no_error() -> None:
    signal = ChangeSignal()
    await signal.wait(signal.generation, 0.001)


@in_event_loop
async def test_who_is_cancelled_in_the_round_of_a_change_ends() -> None:
    """A loop around the wait would otherwise go on for ever, and its owner wait for it as long."""
    signal = ChangeSignal()

    async def forever() -> None:
        while True:
            await signal.wait(signal.generation, 3600.0)

    waiting = asyncio.create_task(forever())
    await asyncio.sleep(0)
    signal.notify()
    waiting.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting.cancelled()


@in_event_loop
async def test_waiters_go_on_in_the_order_in_which_they_came() -> None:
    signal, order = ChangeSignal(), []

    async def wait(number: int) -> None:
        await signal.wait(signal.generation, 3600.0)
        order.append(number)

    waiting = [asyncio.create_task(wait(number)) for number in range(20)]
    await asyncio.sleep(0)
    signal.notify()
    await asyncio.gather(*waiting)
    assert order == list(range(20))
