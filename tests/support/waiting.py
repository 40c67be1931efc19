"""The one way in which tests wait for something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 240.0
"""Seconds. Long, since nobody waits so long unless the test fails anyway, and a busy machine is no failure."""
PAUSE = 0.01


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Wait until `condition()` is true and return what it returned; an error that says what never came."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(PAUSE)
    return value
