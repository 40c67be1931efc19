"""What is simulated: sizes, speeds, loads and faults of one job. Times are seconds, rates per second."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Factor = Callable[[float], float]
"""Of the time since the start; 1.0 is the scenario's own size."""

TOKENS = 1000.0
"""Mean length of a group: of its longest sample."""
RANKS = 64
SLOWEST = 1.073
"""Mean time of the slowest of `RANKS` over that of one, with `RANK_SPREAD`."""
RANK_SPREAD = 0.03


def steady(_: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Scenario:
    """One job.

    need: replicas with which nobody waits, while all factors are 1. slots: groups that a replica holds. half: groups
    at which a replica makes half of its highest tokens per second. group_s: mean time of a group in a full replica.
    step_s: of the trainer, with the slowest rank. length, step: factors of both. tail, jitter: spread (sigma of a
    lognormal) of lengths and of steps. drift: slow spread of mean lengths, which changes each minute.
    lost_per_hour: pre-emptions of a replica. outages, away: (begin, seconds) without a controller, without a trainer.
    tolerance: of a HorizontalPodAutoscaler that obeys the number; None: a launcher does, at once.
    changes: when the load changes at once; climbs: (begin, seconds) in which the need rises. delivers: replicas that
    the platform has at most.
    """

    name: str
    need: int
    seconds: float
    slots: int = 8
    half: float = 8.0
    group_s: float = 60.0
    step_s: float = 60.0
    bound: int = 4
    length: Factor = steady
    step: Factor = steady
    tail: float = 0.35
    jitter: float = 0.05
    drift: float = 0.0
    update_s: float = 3.0
    publish_s: float = 5.0
    start_s: float = 120.0
    start_spread: float = 0.4
    lost_per_hour: float = 0.05
    outages: tuple[tuple[float, float], ...] = ()
    away: tuple[tuple[float, float], ...] = ()
    changes: tuple[float, ...] = ()
    climbs: tuple[tuple[float, float], ...] = ()
    delivers: int = 10**9
    tolerance: float | None = None
    initial: int = 0
    """Replicas at the start; 0: as many as are needed then."""
    minimum: int = 1
    maximum: int = 10_000
    target_wait: float = 0.02
    scale_down_delay: float = 300.0
    interval: float = 15.0
    look_s: float = 2.0
    seed: int = 0
    warm_up: float = 1800.0
    cost_goal: float | None = None
    """Most cost per sample, over that of the cheapest fixed fleet of equal speed; None: not compared."""
    settles: bool = True
    """Whether there is a steady phase, in which the trainer must not wait."""

    @property
    def groups_per_step(self) -> int:
        return max(1, round(self.need * self.rate(0.0, 1.0, 1.0) * self.step_s))

    @property
    def tokens_per_s(self) -> float:
        """Of a replica with very many groups."""
        return TOKENS / self.group_s * (self.slots + self.half)

    def rate(self, now: float, length: float | None = None, step: float | None = None) -> float:
        """Groups of a full replica, without the time that its updates take."""
        length = self.length(now) if length is None else length
        step = self.step(now) if step is None else step
        working = max(0.1, 1.0 - self.update_s / (self.step_s * step))
        return self.slots / (self.group_s * length) * working

    @property
    def peak(self) -> float:
        """The highest need after the warm-up."""
        return max(self.needed(self.warm_up + 60.0 * k) for k in range(int(self.seconds - self.warm_up) // 60 + 1))

    def needed(self, now: float) -> float:
        """Replicas with which nobody waits, from the scenario's own numbers."""
        return self.groups_per_step / (self.step_s * self.step(now)) / self.rate(now)


@dataclass(frozen=True)
class Square:
    """1, then low, then 1, …; each for half a period."""

    low: float
    period: float

    def __call__(self, now: float) -> float:
        return 1.0 if now % self.period < self.period / 2 else self.low


@dataclass(frozen=True)
class Ramp:
    """1 / low until `begin`, down to 1 in the middle of the way to `end`, and back: its inverse is made of lines."""

    low: float
    begin: float
    end: float

    def __call__(self, now: float) -> float:
        middle = (self.begin + self.end) / 2
        share = 1.0 - min(1.0, abs(now - middle) / (middle - self.begin))
        return 1.0 / (self.low + (1.0 - self.low) * share)


def edges(period: float, seconds: float) -> tuple[float, ...]:
    """When `square` changes."""
    return tuple(period / 2 * k for k in range(1, math.ceil(seconds / (period / 2))))
