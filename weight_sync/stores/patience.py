"""Which failures of a remote service pass by themselves, and how long they are waited for.

failure ── passing? ── no ──▶ an error at once: waiting does not mend it
              │ yes
              ▼
give_up seconds since the first attempt? ── yes ──▶ an error
              │ no
              ▼ wait first, 2 · first, 4 · first, … most, each times 0.5 … 1, and try again
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from schema.util.backoff import Backoff

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delays:
    """Seconds. give_up: from the first attempt of a request. first, most: between attempts."""

    give_up: float = 900.0
    first: float = 1.0
    most: float = 60.0


USUAL = Delays()


class Patience:
    """Tries again, for all requests to one service. Thread-safe.

    passing: whether a failure passes by itself. explain: a failure in words, with a remedy. stop: set when the
    process leaves. failed, stopped: the errors to raise."""

    def __init__(
        self,
        passing: Callable[[Exception], bool],
        explain: Callable[[Exception], str],
        stop: threading.Event,
        delays: Delays,
        failed: type[Exception],
        stopped: type[Exception],
    ) -> None:
        self._passing, self._explain, self._stop, self._delays = passing, explain, stop, delays
        self._failed, self._stopped = failed, stopped
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._failing: dict[int, str] = {}

    def trouble(self) -> str:
        """Describe what is being tried again at this moment, the longest first; "" when nothing is."""
        with self._lock:
            return next(iter(self._failing.values()), "")

    def run(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`.

        Raises:
            failed: it failed in a way that waiting does not mend, or for too long.
            stopped: the process leaves.
        """
        attempt, began = 0, time.monotonic()
        with self._lock:
            number = next(self._numbers)
        try:
            while not self._stop.is_set():
                try:
                    return work()
                except (self._failed, self._stopped):
                    raise
                except Exception as error:
                    attempt += 1
                    self._wait(number, what, error, attempt, time.monotonic() - began)
            raise self._stopped(what)
        finally:
            with self._lock:
                self._failing.pop(number, None)

    def _wait(self, number: int, what: str, error: Exception, attempt: int, waited: float) -> None:
        reason = self._explain(error)
        if not self._passing(error):
            raise self._failed(f"{what}: {reason}") from error
        if waited > self._delays.give_up:
            raise self._failed(f"{what}: has failed {attempt} times in {waited:.0f} s: {reason}") from error
        with self._lock:
            self._failing[number] = f"{what} has failed for {waited:.0f} s: {reason}"
        delay = Backoff(self._delays.first, self._delays.most).after(attempt)
        log.warning("%s: %s; attempt %d in %.1f s", what, reason, attempt + 1, delay)
        self._stop.wait(delay)
