"""Which failures pass by themselves, and how long they are waited for.

failure ── passing? ── no ──▶ UploadError at once: waiting does not mend it
              │ yes
              ▼
give_up seconds without any success? ── yes ──▶ UploadError
              │ no
              ▼ wait first, 2 · first, 4 · first, … most, each times 0.5 … 1, and try again
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from policy_worker.uploads.errors import UploadError, UploadStoppedError

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delays:
    """Seconds. give_up: without any success. first, most: between attempts."""

    give_up: float = 900.0
    first: float = 1.0
    most: float = 60.0

    def before(self, attempt: int, chance: float) -> float:
        """Wait before attempt number `attempt` + 1; chance in [0, 1) spreads it, so that ranks do not march."""
        return float(min(self.first * 2.0 ** min(attempt - 1, 30), self.most) * (0.5 + chance / 2))


USUAL = Delays()


class Patience:
    """Tries again, for all uploads to one target. Thread-safe.

    passing: whether a failure passes by itself. explain: a failure in words, with a remedy.
    """

    def __init__(
        self,
        passing: Callable[[Exception], bool],
        explain: Callable[[Exception], str],
        stop: threading.Event,
        delays: Delays = USUAL,
    ) -> None:
        self._passing, self._explain, self._stop, self._delays = passing, explain, stop, delays
        self._last_success = time.monotonic()

    def begin(self) -> None:
        """A new upload: what failed before does not count."""
        self._last_success = time.monotonic()

    def run(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`.

        Raises:
            UploadError: it failed in a way that waiting does not mend, or for too long.
            UploadStoppedError: the process leaves.
        """
        attempt = 0
        while not self._stop.is_set():
            try:
                result = work()
            except (UploadError, UploadStoppedError):
                raise
            except Exception as error:
                attempt += 1
                self._wait(what, error, attempt)
            else:
                self._last_success = time.monotonic()
                return result
        raise UploadStoppedError(what)

    def _wait(self, what: str, error: Exception, attempt: int) -> None:
        if not self._passing(error):
            raise UploadError(f"{what}: {self._explain(error)}") from error
        waited = time.monotonic() - self._last_success
        if waited > self._delays.give_up:
            raise UploadError(
                f"{what}: nothing has succeeded for {waited:.0f} s: {self._explain(error)}"
            ) from error
        delay = self._delays.before(attempt, random.random())
        log.warning("%s: %s; attempt %d in %.1f s", what, self._explain(error), attempt + 1, delay)
        self._stop.wait(delay)
