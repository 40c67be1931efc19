"""Exponential back-off with jitter: first, 2 · first, 4 · first, … at most `most` seconds, each times 0.5 … 1."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Seconds between attempts."""

    first: float
    most: float

    def after(self, attempt: int, at_least: float = 0.0) -> float:
        """Seconds to wait after attempt number `attempt` (from 1) has failed.

        at_least: requested by the other side, before jitter.
        """
        delay = max(at_least, min(self.first * 2.0 ** min(attempt - 1, 30), self.most))
        return float(delay * random.uniform(0.5, 1.0))
