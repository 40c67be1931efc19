"""Latencies by kind of call, and what a run says about them."""

from __future__ import annotations

import math
from collections import defaultdict


class Latencies:
    """Seconds of each call inside the measured window."""

    def __init__(self) -> None:
        self.counting = False
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: float) -> None:
        if self.counting:
            self._seconds[kind].append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind: count, p50 and p99 in milliseconds. There is always an entry for leases."""
        kinds = sorted({*self._seconds, "lease"})
        found = {kind: self._seconds[kind] or [math.inf] for kind in kinds}
        return {
            kind: {"n": len(values), "p50_ms": _quantile(values, 0.5), "p99_ms": _quantile(values, 0.99)}
            for kind, values in found.items()
        }


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)))], 2)
