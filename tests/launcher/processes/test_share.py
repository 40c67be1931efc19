"""Waiting for a share of a job: what a signal ends, what is cleaned up, and which handlers are left afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from launcher.processes.share import attended
from launcher.processes.signals import queued_signals


def test_work_that_a_signal_ends_cleans_up_before_the_wait_is_over() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append("up")

    async def body() -> int | None:
        with queued_signals() as interrupts:
            return await attended(work(), interrupts)

    assert (asyncio.run(body()), cleaned) == (signal.SIGTERM, ["up"])


@pytest.mark.parametrize(
    ("look", "early", "number"), [(bool, [], None), (lambda: True, [], None), (bool, [signal.SIGINT], 2)]
)
def test_what_ends_a_wait(look: Callable[[], bool], early: list[int], number: int | None) -> None:
    async def body() -> int | None:
        with queued_signals(early=early) as interrupts:
            return await attended(asyncio.sleep(0.2 if look is bool else 600), interrupts, look, 0.01)

    assert asyncio.run(body()) == number


def test_handlers_of_before_are_there_again() -> None:
    said: list[str] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda *_: said.append("before")) for number in numbers}

    async def body() -> None:
        with queued_signals(lambda: said.append("inside")):
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.05)

    try:
        asyncio.run(body())
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == ["inside", "before"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
