"""Rollout replicas of a run over time, from its events alone: how many were wanted, why, and how many were there.

    SCALE events   ─▶ wanted, what was measured, decisions with their reasons
    REPLICA events ─▶ how many were there

Bounded however many events there are. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.util.text import one_line
from schema.wire.messages import Event
from schema.wire.messages import dashboard as d
from schema.wire.messages.autoscale import Measures

MOST_MOMENTS = 1500
"""The most moments of a line: about as many as a screen has columns."""
MOST_DECISIONS = 200
"""The newest, that are listed."""
PRESENT = frozenset({"live", "draining"})
"""States of a replica that is there."""

Moment = tuple[float, float]


class HeldLevels:
    """A number that holds from each of its moments to the next: of each stretch the smallest, largest and last."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []

    def add(self, at: float, value: float) -> None:
        self._moments.append((at, value))
        if len(self._moments) > 2 * MOST_MOMENTS:
            self._moments = thinned(self._moments, MOST_MOMENTS)

    @property
    def last(self) -> float | None:
        return self._moments[-1][1] if self._moments else None

    @property
    def moments(self) -> list[Moment]:
        """At most `MOST_MOMENTS` and a few."""
        return thinned(self._moments, MOST_MOMENTS)


def thinned(moments: list[Moment], most: int) -> list[Moment]:
    """At most `most` of them and a few, in their order; the last one is among them."""
    if len(moments) <= most:
        return list(moments)
    stretch, chosen = math.ceil(3 * len(moments) / most), []
    for start in range(0, len(moments), stretch):
        part = range(start, min(start + stretch, len(moments)))
        ends = {min(part, key=lambda i: moments[i][1]), max(part, key=lambda i: moments[i][1]), part[-1]}
        chosen += [moments[i] for i in sorted(ends)]
    return chosen


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """They hold what a run's configuration says of the number of its rollout replicas. note: why it does not change,
    if so."""

    note: str
    first: int
    minimum: int
    maximum: int

    @classmethod
    def of(cls, config: Mapping[str, Any], run_dir: Path) -> ScaleSettings:
        """From a config.json, which may be damaged, or of another version."""
        scale = _inside(config, "autoscale")
        first = _whole(_inside(config, "rollout", "parallelism").get("n_init_replicas"), 1)
        if _inside(config, "train", "train_policy").get("type") == "sft":
            return cls("supervised training has no rollout replicas", 0, 0, 0)
        if scale.get("enable") is not True:
            note = (
                f"autoscale.enable = false: the job keeps as many rollout replicas as it began with ({first}). To "
                f"have their number follow the need: cosmos-launch --resume {run_dir} --set autoscale.enable=true"
            )
            return cls(note, first, first, first)
        return cls("", first, _whole(scale.get("min_replicas"), 1), _whole(scale.get("max_replicas"), first))


def _inside(table: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        nested = table.get(key)
        table = nested if isinstance(nested, dict) else {}
    return table


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


class ScaleHistory:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._wanted, self._there = HeldLevels(), HeldLevels()
        self._measured = {name: HeldLevels() for name in ("need", "wait", "throttled")}
        self._newest: Measures | None = None
        self._decisions: deque[d.ScaleDecision] = deque(maxlen=MOST_DECISIONS)
        self._made = 0
        self._present: set[str] = set()

    def scale(self, event: Event) -> None:
        """A decision. Raises KeyError, TypeError or ValueError for data of another version."""
        data = event.data
        decision = d.ScaleDecision(
            at=event.at, before=data["before"], desired=data["desired"], kind=data["why"], reason=data["reason"]
        )
        for count in (decision.before, decision.desired):
            if self._wanted.last != count:
                self._wanted.add(event.at, count)
        self._decisions.append(decision)
        self._made += 1
        if data.get("measures") is not None:
            self._newest = Measures.model_validate(data["measures"])
            for name, levels in self._measured.items():
                levels.add(event.at, getattr(self._newest, name))

    def replica(self, event: Event) -> None:
        """Another state of a replica. Raises KeyError for data of another version."""
        data, name = event.data, str(event.data["name"])
        if data["role"] != "rollout" or (data["state"] in PRESENT) == (name in self._present):
            return
        self._present ^= {name}
        self._there.add(event.at, len(self._present))

    def answer(
        self, settings: ScaleSettings, began: float | None, ended: float | None, now: float | None
    ) -> d.Scaling:
        """All of it. began, ended: of the events, now: of the answer, where the job is served; Unix times."""
        wanted = [(at, int(value)) for at, value in self._wanted.moments]
        if began is not None and not (settings.note and not wanted):
            wanted = [(began, wanted[0][1] if wanted else settings.first), *wanted]
        return d.Scaling(
            enabled=not settings.note,
            note=one_line(settings.note),
            minimum=settings.minimum,
            maximum=settings.maximum,
            desired=wanted,
            replicas=[(at, int(value)) for at, value in self._there.moments],
            **{name: levels.moments for name, levels in self._measured.items()},
            measures=self._newest,
            decisions=list(self._decisions),
            made=self._made,
            began=began,
            ended=ended,
            now=now,
        )
