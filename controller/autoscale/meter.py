"""The meter measures what a job takes and what its rollout replicas make, over the newest steps. Pure.

Levels (groups leased, groups that the bound refuses, replicas, what the trainer does) are integrated over time, and
each commit marks a place from where a window may begin. Demand and supply are rates of different clocks, so that
neither depends on how long the other one waited:

    demand   groups that the trainer takes per second *of its work*
    supply   groups that a replica makes per second, half of each that is under way counted, divided by the share of
             what it could hold that the bound lets it hold

Their quotient is the number of replicas with which nobody waits. It needs no model of an engine, and a change of the
number of replicas within the window does not change it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

Trainer = Literal["away", "waits", "works"]

GAP = 10.0
"""Seconds without a look after which nothing is known of the time between: the process was suspended."""
LEAST_STEPS, LEAST_GROUPS = 2, 24
"""Committed steps of a window, and their groups, where there are so many: of fewer chance is too large a part."""
REFUSED = 0.05
"""Share of the groups that replicas could hold, up to which the bound holds nobody back."""
MARKS = 512
"""Places from where a window may begin."""


@dataclass(frozen=True, slots=True)
class MeterLevels:
    """A level is so from one look to the next.

    held: groups that are leased. asked: groups that replicas ask for and the bound refuses. replicas: those that have
    leased. empty: of these, those that hold nothing, and are refused. late: a batch is ready, so if the trainer
    waits, then for groups that are due.
    """

    held: int
    asked: int
    replicas: int
    empty: int = 0
    late: bool = False

    @property
    def refuses(self) -> bool:
        """Whether the bound holds replicas back."""
        return self.asked > REFUSED * (self.held + self.asked)


@dataclass(frozen=True, slots=True)
class MeterTotals:
    """Sums since the meter began: seconds, group-seconds, replica-seconds, counts."""

    at: float
    counted: float = 0.0
    waited: float = 0.0
    lacked: float = 0.0
    refused: float = 0.0
    worked: float = 0.0
    held: float = 0.0
    asked: float = 0.0
    replicas: float = 0.0
    empty: float = 0.0
    ready: int = 0
    under_way: int = 0
    """Groups that are leased now: on average half of each is made."""
    tokens: int = 0
    trained: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """A window. Rates are per second.

    began, seconds: of the window. wait: share of its time that the trainer waited for samples. lack: share that it
    waited while neither the bound held replicas back nor a batch was ready of which some groups were late: more
    replicas would have helped. refused: share that it waited while the bound held replicas back, and no batch was
    ready. throttled: share of the groups that replicas could hold, which the bound refused. idle: share of their time
    in which it left them with none. demand: groups that the trainer takes while it works. rate: groups that a replica
    makes. capacity: groups that it holds if it may. lease_age: seconds of a lease. tokens_per_group: of ready ones.
    replicas: mean number. step_time: seconds from commit to commit.
    """

    began: float
    seconds: float
    wait: float
    lack: float
    refused: float
    throttled: float
    idle: float
    demand: float
    rate: float
    capacity: float
    lease_age: float
    tokens_per_group: float
    replicas: float
    step_time: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of a replica."""
        return self.rate * self.tokens_per_group

    @property
    def need(self) -> float:
        """Replicas with which neither side would wait, if one is as fast for each group however many it holds."""
        return self.demand * (1.0 - self.throttled) / self.rate

    @property
    def most_needed(self) -> float:
        """The same, if one that holds fewer groups makes them no slower in all."""
        return self.demand * (1.0 - self.idle) / self.rate

    @property
    def supply(self) -> float:
        """Groups per second of all replicas."""
        return self.rate * self.replicas


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The time before the first commit: how long, `lack` in seconds, groups that are leased, and ready by now."""

    seconds: float
    lacked: float
    held: int
    ready: int
    lease_age: float


class Meter:
    """See the module's docstring. The ledger counts from the same moment on."""

    def __init__(self, now: float) -> None:
        self._now = MeterTotals(now)
        self._levels: MeterLevels | None = None
        self._trainer: Trainer = "away"
        self._marks: deque[MeterTotals] = deque(maxlen=MARKS)
        self._last: MeterTotals | None = None
        """At the last commit."""

    def look(self, now: float, levels: MeterLevels | None, ready: int, tokens: int) -> None:
        """Note what is so from now on; None: something holds the job up, which says nothing of supply or demand.

        ready, tokens: groups that ever became ready, and their generated tokens.
        """
        self._advance(now)
        self._levels = levels
        under_way = self._now.under_way if levels is None else levels.held
        self._now = replace(self._now, ready=ready, tokens=tokens, under_way=under_way)
        self._begin()

    def trainer(self, now: float, does: Trainer) -> None:
        """Note what the trainer does from now on. A window may begin where it first asks for a batch."""
        self._advance(now)
        self._trainer = does
        self._begin()

    def _begin(self) -> None:
        if not self._marks and self._trainer == "waits" and self._levels is not None:
            self._marks.append(self._now)

    def committed(self, now: float, groups: int, spacing: float = 0.0) -> None:
        """A step of so many groups was trained. spacing: seconds between two marks, for jobs of short steps."""
        self._advance(now)
        known = self._now
        self._last = self._now = replace(known, steps=known.steps + 1, trained=known.trained + groups)
        if self._levels is not None and (not self._marks or now - self._marks[-1].at >= spacing):
            self._marks.append(self._now)

    def restart(self) -> None:
        """Forget the windows: what was measured is of another course of the job."""
        self._marks.clear()
        self._last = None

    @property
    def is_away(self) -> bool:
        """Whether no trainer asks for batches."""
        return self._trainer == "away"

    def window(self, now: float, seconds: float) -> Measured | None:
        """The newest window of at least so many seconds and `LEAST_STEPS` steps, or all there is; None before the
        first commit, and while no replica has made a group in it."""
        self._advance(now)
        last = self._last
        marks = [mark for mark in self._marks if last is not None and mark.steps < last.steps]
        if last is None or not marks:
            return None
        begun = next(
            (mark for mark in reversed(marks) if now - mark.at >= seconds and _suffices(mark, last)), marks[0]
        )
        return _between(begun, last, self._now)

    def beginning(self, now: float) -> WarmUp | None:
        """Since the trainer asked for its first batch; None after the first commit, and where none has asked."""
        self._advance(now)
        if self._last is not None or not self._marks or self._levels is None:
            return None
        begun, known = self._marks[0], self._now
        ready = known.ready - begun.ready
        return WarmUp(
            seconds=known.counted - begun.counted,
            lacked=known.lacked - begun.lacked,
            held=self._levels.held,
            ready=ready,
            lease_age=(known.held - begun.held) / max(1.0, ready + self._levels.held / 2),
        )

    def _advance(self, now: float) -> None:
        known, levels = self._now, self._levels
        passed = max(0.0, now - known.at)
        if levels is None or passed > GAP:
            self._now = replace(known, at=max(now, known.at))
            return
        waits = self._trainer == "waits"
        self._now = replace(
            known,
            at=known.at + passed,
            counted=known.counted + passed,
            waited=known.waited + passed * waits,
            lacked=known.lacked + passed * (waits and not levels.late and not levels.refuses),
            refused=known.refused + passed * (waits and not levels.late and levels.refuses),
            worked=known.worked + passed * (self._trainer == "works"),
            held=known.held + passed * levels.held,
            asked=known.asked + passed * levels.asked,
            replicas=known.replicas + passed * levels.replicas,
            empty=known.empty + passed * levels.empty,
        )


def _suffices(begun: MeterTotals, last: MeterTotals) -> bool:
    return last.steps - begun.steps >= LEAST_STEPS and last.trained - begun.trained >= LEAST_GROUPS


def _between(begun: MeterTotals, last: MeterTotals, now: MeterTotals) -> Measured | None:
    """last: at the last commit; the trainer has taken what it has taken by then."""
    ready, seconds = now.ready - begun.ready, now.at - begun.at
    made = ready + (now.under_way - begun.under_way) / 2
    held, asked = now.held - begun.held, now.asked - begun.asked
    replicas, worked = now.replicas - begun.replicas, last.worked - begun.worked
    if ready <= 0 or made <= 0 or replicas <= 0 or held <= 0 or worked <= 0:
        return None
    waited, busy = now.waited - begun.waited, now.worked - begun.worked
    return Measured(
        began=begun.at,
        seconds=seconds,
        wait=waited / (waited + busy),
        lack=(now.lacked - begun.lacked) / (waited + busy),
        refused=(now.refused - begun.refused) / (waited + busy),
        throttled=asked / (held + asked),
        idle=(now.empty - begun.empty) / replicas,
        demand=(last.trained - begun.trained) / worked,
        rate=made / replicas,
        capacity=(held + asked) / replicas,
        lease_age=held / made,
        tokens_per_group=(now.tokens - begun.tokens) / ready,
        replicas=replicas / (now.counted - begun.counted),
        step_time=(last.at - begun.at) / (last.steps - begun.steps),
    )
