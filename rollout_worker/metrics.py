"""Numbers for the display: throughput over the last seconds, and how much of the time the engine was idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rollout_worker.engines.base import EngineStats
from rollout_worker.rewards.pool import PoolStats

WINDOW = 10.0
"""Seconds that rates look back: smooth enough to read, short enough to notice a stop."""


class Metrics:
    """Fed with the engine's totals at every heartbeat; time comes in as `now`."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, EngineStats]] = deque()
        self._first_lease: tuple[float, float] | None = None
        self.extra: dict[str, float] = {}
        """Further numbers, set where they are measured (seconds of the last update, say)."""
        self.rewards: Callable[[], PoolStats] = PoolStats
        """A reading of what the reward pool does, once there is one."""
        self._scoring_before, self._idle_before, self._waited = 0, 0.0, 0.0

    def training_began(self, now: float, stats: EngineStats) -> None:
        """The first training lease: idle time counts from here. Later calls change nothing."""
        if self._first_lease is None:
            self._first_lease = (now, stats.idle_s)

    def read(self, now: float, stats: EngineStats) -> dict[str, float]:
        self._points.append((now, stats))
        while len(self._points) > 2 and now - self._points[1][0] >= WINDOW:
            self._points.popleft()
        then, before = self._points[0]
        seconds = now - then
        values = {
            "samples_per_s": (stats.samples - before.samples) / seconds if seconds > 0 else 0.0,
            "tokens_per_s": (stats.tokens - before.tokens) / seconds if seconds > 0 else 0.0,
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "longest_tokens": float(stats.longest),
            **self.extra,
        }
        rewards = self.rewards()
        idle, self._idle_before = stats.idle_s - self._idle_before, stats.idle_s
        if self._first_lease is not None and rewards.pending and self._scoring_before:
            self._waited += idle
        self._scoring_before = rewards.pending
        values |= {
            "scoring": float(rewards.pending),
            "scoring_oldest_s": rewards.oldest_s,
            "reward_attempts": float(rewards.attempts),
            "reward_retried": float(rewards.retried),
            "reward_seconds": rewards.seconds,
            "reward_wait_seconds": self._waited,
        }
        if self._first_lease is not None and now > self._first_lease[0]:
            began, idle = self._first_lease
            values["leased_seconds"] = now - began
            values["idle_fraction"] = min(max((stats.idle_s - idle) / (now - began), 0.0), 1.0)
        return values
