"""What a run shows: waiting in steady phases and in between, when it settles, whether it flaps, what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.fleet.scenario import Scenario
from benchmarks.fleet.simulator import Point, Result, Simulator

IDLE_GOAL = 0.03
"""Most share of a steady phase that the trainer waits."""
SETTLE = 3.0
"""Most times lease and start that the number needs to settle after a change of the load."""
NEAR = 0.10
"""A number has settled when it stays so near to where it ends, or within one replica: of the number or of the
change, whichever is larger."""
FLIPS_GOAL = 2.0
"""Most changes of direction in an hour of steady phases."""
EQUAL = 0.99
"""Share of the groups that count as equally many."""


@dataclass(frozen=True)
class Verdict:
    """idle: share of its time that the trainer waits, in steady phases, in between, and in all. flips: changes of
    direction in an hour of steady phases. settled: the longest time after a change until the number stays, over lease
    and start.
    cost: replica-seconds of a group; ratio: over the fixed fleet of `fixed` replicas. faults: what misses its goal.
    """

    name: str
    need: float
    idle: float
    idle_between: float
    idle_all: float
    settled: float | None
    flips: float
    cost: float
    ratio: float | None
    fixed: int | None
    max_staleness: int
    faults: tuple[str, ...]


def judge(scenario: Scenario, result: Result, fixed: tuple[int, float] | None) -> Verdict:
    """fixed: size and cost of the fixed fleet."""
    takes = scenario.group_s + scenario.start_s
    phases = _phases(scenario)
    steady = [p for begin, end in phases for p in result.points if begin + SETTLE * takes <= p.at < end]
    names = {id(point) for point in steady}
    between = [p for p in result.points if id(p) not in names and p.at >= scenario.warm_up]
    ratio = None if fixed is None else result.cost / fixed[1]
    hours = max(0.25, 30.0 * len(steady) / 3600.0)
    flips = sum(_flips(result.points, begin + SETTLE * takes, end) for begin, end in phases) / hours
    settled = max((_settled(result.points, begin, end) for begin, end in phases), default=0.0) / takes
    faults = []
    if result.over_bound or result.max_staleness > scenario.bound:
        faults.append("bound")
    if scenario.settles:
        faults += ["idle"] * (_idle(steady) >= IDLE_GOAL)
        faults += ["settle"] * (bool(scenario.changes) and settled > SETTLE)
    faults += ["flips"] * (flips > FLIPS_GOAL)
    faults += ["cost"] * (ratio is not None and ratio > (scenario.cost_goal or math.inf))
    return Verdict(
        name=scenario.name,
        need=round(scenario.peak, 1),
        idle=round(_idle(steady), 4),
        idle_between=round(_idle(between), 4),
        idle_all=round(result.idle, 4),
        settled=round(settled, 2) if scenario.changes else None,
        flips=round(flips, 2),
        cost=round(result.cost, 2),
        ratio=None if ratio is None else round(ratio, 3),
        fixed=None if fixed is None else fixed[0],
        max_staleness=result.max_staleness,
        faults=tuple(faults),
    )


def cheapest(scenario: Scenario, result: Result) -> tuple[int, float]:
    """Size and cost of the smallest fleet that trains as many groups all the time, within 1.5 % of its size."""
    low, high = round(0.7 * scenario.peak), math.ceil(1.25 * scenario.peak) + 1
    costs: dict[int, float] = {}
    while high - low > max(1, round(0.015 * scenario.peak)):
        middle = (low + high) // 2
        found = Simulator(scenario, middle).run()
        costs[middle] = found.cost
        if found.trained >= EQUAL * result.trained:
            high = middle
        else:
            low = middle
    if high not in costs:
        costs[high] = Simulator(scenario, high).run().cost
    return high, costs[high]


def _phases(scenario: Scenario) -> list[tuple[float, float]]:
    """Between two disturbances; the first begins before the warm-up ends."""
    broken = (*scenario.away, *scenario.climbs)
    ends = [begin + seconds for begin, seconds in (*scenario.outages, *broken)]
    cuts = sorted({0.0, *scenario.changes, *ends})
    begins = [begin for begin, _ in broken]
    pairs = zip(cuts, [*cuts[1:], scenario.seconds], strict=True)
    return [(begin, min([end, *(b for b in begins if begin < b < end)])) for begin, end in pairs]


def _idle(points: Sequence[Point]) -> float:
    waited, worked = sum(p.waited for p in points), sum(p.worked for p in points)
    return waited / max(1e-9, waited + worked)


def _settled(points: Sequence[Point], begin: float, end: float) -> float:
    """Seconds from `begin` until the number stays near where it is at `end`."""
    phase = [p for p in points if begin <= p.at < end]
    last = phase[-1].desired if phase else 0
    change = abs(last - phase[0].desired) if phase else 0
    far = [p.at for p in phase if abs(p.desired - last) > max(1.0, NEAR * last, NEAR * change)]
    return far[-1] + 30.0 - begin if far else 0.0


def _flips(points: Sequence[Point], begin: float, end: float) -> int:
    """Changes of direction in a phase."""
    numbers = [p.desired for p in points if begin <= p.at < end]
    steps = [b - a for a, b in pairwise(numbers) if b != a]
    return sum((a > 0) != (b > 0) for a, b in pairwise(steps))
