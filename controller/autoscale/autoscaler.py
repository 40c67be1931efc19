"""The decision: how many rollout replicas there should be now, and why. A state machine without a clock.

    the trainer waits more than target_wait ─┬─ while the bound refuses nothing ──▶ more: need with headroom
                                             ├─ and the bound refuses ──▶ some more, as a trial
                                             └─ for groups that are late ──▶ as they are
    need with headroom was lower for scale_down_delay ──▶ fewer: the highest need of that time
    else ──▶ as they are

A window of the job gives the need (see `meter`). More is limited to twice as many at once; by the maximum; by the end
of the job. Before the first step is trained the demand cannot be measured: replicas are doubled while its groups
would take long to come. While nothing can be measured (paused, an outage of rewards, no trainer) the number stays. It
is 0 only when the job is over.

Where the bound lets each replica hold only some of the groups that it could, more of them may help, since each is
faster with fewer, or may not, since as many groups are under way as before. That is tried, and taken back where they
made no more. Where they did, the measured need tells too little, and so much more headroom is kept. Where they made
far fewer, the load has changed meanwhile, or they are in each other's way: what is made afterwards, by the number of
before, tells which.

Down it goes to what is needed, by the highest rate of a replica that was seen lately; where none was, half of the
way. After a raise lies the time in which it shows, and a few replicas too many are not worth a change. What was
learned is forgotten after a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from controller.autoscale.meter import Measured, WarmUp

HEADROOM = 1.05
"""Times the measured need: at the need itself the trainer waits by chance."""
LEAST_FEWER = 0.03
"""Share of the replicas that is drained at least: fewer are not worth a change."""
SPEEDS = 1.1
"""Times the present number that the need must be before a change has shown, to add to it all the same."""
MOST_HEADROOM = 4.0
TRIAL = 1.25
"""Times as many replicas at least where it is tried whether more are faster."""
WORTH = 0.15
"""Share of its time that the trainer must wait while the bound refuses groups: less is not worth a trial."""
TRIED = 0.25
"""Share of the gain in proportion to their number that has to be seen."""
FELL = 0.8
"""Share of what was made before a trial, below which the number of replicas alone does not explain it."""
MOST_IDLE = 0.5
"""Share of their time that the bound may leave replicas without work, and more of them may still help."""
FULL = 0.05
"""Share that the bound may refuse of what replicas could hold, and they are as busy as they can be."""
MOST_LOST = 1.5
"""Times the need that may be requested because replicas are missing all the time."""
LATELY = 12.0
"""Times `scale_down_delay` for which a replica's highest rate counts: tokens may have become cheaper since."""
FORGET = 3600.0
USUAL_START = 60.0
"""Seconds until a requested replica leases, before one was seen to do so."""
STARTS = 16
"""Starts whose median counts."""

Kind = Literal[
    "unknown", "enough", "settling", "more", "fewer", "limit", "bound", "both", "ending", "hold", "manual", "over"
]


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings. groups: that may be under way at once under the staleness bound. Times are seconds."""

    minimum: int
    maximum: int
    target_wait: float
    scale_down_delay: float
    groups: int
    bound: int

    @property
    def batch(self) -> int:
        """Groups of a step."""
        return self.groups // (self.bound + 1)


@dataclass(frozen=True, slots=True)
class Seen:
    """The job now. working: replicas that lease. beginning: while nothing is measured.

    hold: why nothing can be decided; empty: it can. over: why no replica is needed any more; empty: some are. left:
    steps to train, if known.
    """

    measured: Measured | None
    working: int
    beginning: WarmUp | None = None
    hold: str = ""
    over: str = ""
    left: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """kind: of the reason, the same while it stays the same."""

    desired: int
    kind: Kind
    reason: str


@dataclass(slots=True)
class PastDecisions:
    """A decision leaves this for later ones; it is stored. Times are those of the caller's clock. Its lists are
    replaced, never changed."""

    desired: int
    manual: int | None = None
    changed_at: float = 0.0
    raised: bool = False
    headroom: float = HEADROOM
    headroom_at: float = 0.0
    tried: list[float] = field(default_factory=list)
    """A trial: the number before it, the groups per second that those made, and the need that was measured."""
    doubted: float = 0.0
    """Groups per second before a trial in which far fewer were made; 0: there was none."""
    useful: int = 0
    """Beyond which more made no difference; 0: not known."""
    useful_at: float = 0.0
    fastest: float = 0.0
    """Tokens per second of a replica that nothing held back; 0: not known."""
    fastest_at: float = 0.0
    starts: list[float] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)
    """Raises whose replicas have not leased yet: when, and how many."""

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PastDecisions:
        coming = [(float(at), int(count)) for at, count in record["coming"]]
        return cls(**{**record, "coming": coming})


class Autoscaler:
    """See the module's docstring."""

    def __init__(self, limits: Limits, memory: PastDecisions) -> None:
        self.limits, self.memory = limits, memory
        memory.desired = self._within(memory.desired)
        if memory.manual is not None:
            memory.manual = self._within(memory.manual)
        self._needs: deque[tuple[float, int]] = deque()
        """When, and how many would have done, in the last `scale_down_delay` seconds; falling."""
        self._watched_since: float | None = None
        self._refused_since: float | None = None
        """Since when the trainer waits while the bound refuses groups."""
        self.last = self._by_request() or Decision(memory.desired, "unknown", "nothing is measured yet")

    def _by_request(self) -> Decision | None:
        """A person's number, while it counts."""
        number = self.memory.manual
        if number is None:
            return None
        return Decision(number, "manual", f"{number} by request, until it is taken back")

    def _within(self, replicas: int) -> int:
        """The nearest number that the limits allow; they may be others than when it was stored."""
        return min(max(replicas, self.limits.minimum, 1), self.limits.maximum)

    @property
    def start_time(self) -> float:
        """Typical seconds from a request to the new replica's first lease."""
        return median(self.memory.starts) if self.memory.starts else USUAL_START

    def joined(self, now: float, count: int) -> None:
        """So many replicas lease for the first time."""
        memory = self.memory
        while memory.coming and count > 0:
            (at, missing), *later = memory.coming
            memory.starts = [*memory.starts, max(0.0, now - at)][-STARTS:]
            memory.coming = [(at, missing - count), *later] if missing > count else later
            count -= missing

    def request(self, now: float, replicas: int | None) -> Decision:
        """A person's number, until it is taken back (None). Raises ValueError if it is out of range."""
        limits = self.limits
        if replicas is not None and replicas != self._within(replicas):
            raise ValueError(
                f"{replicas} replicas are out of range: autoscale.min_replicas = {limits.minimum}, "
                f"autoscale.max_replicas = {limits.maximum}, and one at least while the job runs"
            )
        self.memory.manual = replicas
        self._watch_anew()
        requested = self._by_request()
        if requested is None:
            self.last = Decision(self.memory.desired, "unknown", "the number follows the need again")
        else:
            self.last = self._set(now, requested.desired, requested.kind, requested.reason)
        return self.last

    def decide(self, now: float, seen: Seen) -> Decision:
        """The number from now on."""
        self.last = self._decide(now, seen)
        return self.last

    def _decide(self, now: float, seen: Seen) -> Decision:
        memory, measured = self.memory, seen.measured
        if seen.over:
            return Decision(0, "over", seen.over)
        if (requested := self._by_request()) is not None:
            return requested
        if seen.hold:
            self._watch_anew()
            return self._keep("hold", seen.hold)
        if measured is None:
            return self._begin(now, seen)
        self._remember(now, measured)
        would_do = math.ceil(self._with_losses(measured, measured.need) * memory.headroom - 1e-6)
        self._note(now, would_do)
        if self._can_judge(measured) and (in_vain := self._judge(now, measured)) is not None:
            return in_vain
        if measured.lack > self.limits.target_wait:
            return self._more(now, seen, measured)
        if measured.refused > max(WORTH, self.limits.target_wait):
            return self._try(now, seen, measured)
        self._refused_since, memory.doubted = None, 0.0
        enough_for = self._enough_for(now)
        if enough_for is not None and enough_for < memory.desired:
            return self._fewer(now, measured, enough_for)
        if measured.wait > self.limits.target_wait:
            late = "for groups that are late" if measured.lack < measured.wait / 2 else "by chance"
            return self._keep("enough", f"{_waits(measured)}, {late}, which more replicas would not mend")
        return self._keep("enough", f"{_rates(measured)}: enough")

    def _begin(self, now: float, seen: Seen) -> Decision:
        """Before the first step is trained nobody knows the demand; but it must not take the first step for ever."""
        beginning, memory = seen.beginning, self.memory
        unknown = "nothing is measured yet: no step was trained, or no group was made since"
        if beginning is None or not beginning.ready or beginning.lacked < beginning.seconds / 2:
            return self._keep("unknown", unknown)
        batch = self.limits.batch
        left = (batch - beginning.ready) * beginning.seconds / beginning.ready
        takes = self.start_time + beginning.lease_age
        waited = min(beginning.seconds, now - memory.changed_at)
        goal = min(2 * memory.desired, self.limits.maximum)
        full = beginning.held + beginning.ready >= batch
        if full or min(left, waited) < takes or seen.working < memory.desired or goal <= memory.desired:
            return self._keep("unknown", unknown)
        return self._set(
            now, goal, "more", f"the first step needs {batch} groups and has {beginning.ready}: {left:.0f} s more"
        )

    # ---- more ---------------------------------------------------------------------------------------------

    def _more(self, now: float, seen: Seen, measured: Measured) -> Decision:
        """The trainer waits, and the bound refuses nothing: more replicas make more."""
        desired, limits, waits = self.memory.desired, self.limits, _waits(measured)
        goal = math.ceil(self._with_losses(measured, measured.need) * HEADROOM - 1e-6)
        if not self._has_shown(measured) and goal < desired * SPEEDS:
            return self._keep("settling", f"{waits}: waiting for what the last change does")
        if goal <= desired:
            if seen.working < desired:
                return self._keep("settling", f"{waits}: {_missing(seen.working, desired)}")
            return self._keep("enough", f"{waits}, by chance: {_rates(measured)}")
        useful = max(1, math.ceil(limits.groups / measured.capacity - 1e-6))
        most = min(limits.maximum, max(useful, desired))
        return self._raise(now, seen, measured, min(goal, most), waits)

    def _try(self, now: float, seen: Seen, measured: Measured) -> Decision:
        """The trainer waits, and the bound lets replicas hold only some of the groups that they could."""
        memory, limits, waits = self.memory, self.limits, _waits(measured)
        if self._refused_since is None:
            self._refused_since = now
        if not self._has_shown(measured) or measured.began < self._refused_since:
            return self._keep("settling", f"{waits}: waiting for what the last change does, or the load's")
        if seen.working < memory.desired:
            return self._keep("settling", f"{waits}: {_missing(seen.working, memory.desired)}")
        made, memory.doubted = memory.doubted, 0.0
        if made and measured.supply >= made * FELL:  # the load is what it was
            memory.useful, memory.useful_at = memory.desired, now
        if measured.idle > MOST_IDLE:
            return self._keep(
                "both",
                f"{waits}, and the bound leaves replicas without work {measured.idle:.0%} of theirs: both wait for "
                f"each other, which allowed_outdated_steps = {limits.bound + 1} would mend, not more replicas",
            )
        goal = math.ceil(max(measured.most_needed * HEADROOM, memory.desired * TRIAL) - 1e-6)
        most = min(limits.maximum, limits.groups, memory.useful or limits.maximum)
        before = memory.desired
        decision = self._raise(now, seen, measured, min(goal, most), waits)
        if decision.kind == "more":
            memory.tried = [before, measured.supply, measured.need]
        return decision

    def _raise(self, now: float, seen: Seen, measured: Measured, goal: int, waits: str) -> Decision:
        """To the goal, or to twice the number where that is less, unless the job ends before it helps."""
        desired, takes = self.memory.desired, self.start_time + measured.lease_age
        goal = min(goal, 2 * desired)
        if goal <= desired:
            return self._keep(*self._limited(waits))
        if seen.left is not None and (ends := seen.left * measured.step_time) < takes:
            text = f"{waits}, but the job ends in about {ends:.0f} s, and a replica helps after {takes:.0f} s"
            return self._keep("ending", text)
        return self._set(now, goal, "more", f"{waits}: {_rates(measured)}")

    def _limited(self, waits: str) -> tuple[Kind, str]:
        limits, useful = self.limits, self.memory.useful
        if useful and useful <= self.memory.desired:
            return ("bound", f"{waits}, but {self._bound()}, and more than {useful} replicas made no more of them")
        if self.memory.desired >= limits.maximum:
            return "limit", f"{waits}, but autoscale.max_replicas = {limits.maximum}"
        return "bound", f"{waits}, but {self._bound()}: more replicas would have nothing to do"

    def _bound(self) -> str:
        return f"the bound of {self.limits.bound} steps lets {self.limits.groups} groups be under way"

    def _can_judge(self, measured: Measured) -> bool:
        """Whether a trial has shown what more replicas do: most of them were there all the time."""
        memory = self.memory
        if not memory.tried or not self._has_shown(measured):
            return False
        return measured.replicas >= (memory.tried[0] + memory.desired) / 2

    def _judge(self, now: float, measured: Measured) -> Decision | None:
        """The end of a trial: back to the number before, if more replicas made hardly more; else keep them."""
        memory = self.memory
        (before, made, need), memory.tried = memory.tried, []
        desired, grown = memory.desired, memory.desired / before
        if grown <= 1.0:
            return None
        if measured.wait <= self.limits.target_wait or measured.supply >= made * (1.0 + TRIED * (grown - 1.0)):
            # More of them hold fewer groups each, and look the less needed.
            memory.headroom = min(max(memory.headroom, desired / need * grown), MOST_HEADROOM)
            memory.headroom_at = now
            self._watch_anew()
            return None
        made_now = f"{desired} replicas made {measured.supply:.3g} groups/s, {before:.0f} made {made:.3g}"
        if measured.supply < made * FELL:
            memory.doubted = made
            return self._set(now, int(before), "bound", f"{made_now}: whether the load has changed shows now")
        memory.useful, memory.useful_at = int(before), now
        hint = f"allowed_outdated_steps = {self.limits.bound + 1} would help"
        return self._set(now, int(before), "bound", f"{made_now}: {self._bound()}; {hint}")

    # ---- fewer --------------------------------------------------------------------------------------------

    def _fewer(self, now: float, measured: Measured, enough: int) -> Decision:
        memory = self.memory
        if (memory.raised or not memory.fastest) and not self._has_shown(measured):
            return self._keep("settling", "waiting for what the last change does")
        if memory.fastest:  # with fewer each would have to be faster than one was seen lately
            tokens = measured.demand * measured.tokens_per_group * memory.headroom
            enough = max(enough, math.ceil(tokens / memory.fastest - 1e-6))
        else:
            enough = max(enough, (memory.desired + enough) // 2)
        goal = max(enough, self.limits.minimum, 1)
        if goal > memory.desired * (1.0 - LEAST_FEWER):
            return self._keep("enough", f"{_rates(measured)}: enough")
        delay = f"for {self.limits.scale_down_delay:g} s no more than {goal} were needed"
        return self._set(now, goal, "fewer", f"{delay}: {_rates(measured)}")

    def _note(self, now: float, would_do: int) -> None:
        """Keep the numbers of the last `scale_down_delay` seconds that no later one exceeds."""
        if self._watched_since is None:
            self._watched_since = now
        while self._needs and self._needs[-1][1] <= would_do:
            self._needs.pop()
        self._needs.append((now, would_do))
        while self._needs[0][0] < now - self.limits.scale_down_delay:
            self._needs.popleft()

    def _enough_for(self, now: float) -> int | None:
        """Return what would have done for the last `scale_down_delay` seconds; None: not watched for so long."""
        since = self._watched_since
        if since is None or now - since < self.limits.scale_down_delay:
            return None
        return self._needs[0][1]

    def _watch_anew(self) -> None:
        self._needs.clear()
        self._watched_since = self._refused_since = None

    # ---- both ---------------------------------------------------------------------------------------------

    def _remember(self, now: float, measured: Measured) -> None:
        memory = self.memory
        if measured.throttled < FULL:
            memory.fastest, memory.fastest_at = measured.tokens_per_s, now
        elif now - memory.fastest_at > LATELY * self.limits.scale_down_delay:
            memory.fastest = 0.0
        if now - memory.useful_at > FORGET:
            memory.useful = 0
        if now - memory.headroom_at > FORGET:
            memory.headroom = HEADROOM

    def _has_shown(self, measured: Measured) -> bool:
        """Whether the whole window lies behind the last change and what it took to happen."""
        memory = self.memory
        return measured.began >= memory.changed_at + (self.start_time if memory.raised else 0.0)

    def _with_losses(self, measured: Measured, need: float) -> float:
        """Replicas to request so that `need` are there, where some are missing all the time: lost and replaced.

        A platform that has not delivered what was requested is not asked for more on that account.
        """
        if self.memory.coming or not self._has_shown(measured):
            return need
        return need * min(max(1.0, self.memory.desired / measured.replicas), MOST_LOST)

    def _set(self, now: float, goal: int, kind: Kind, reason: str) -> Decision:
        memory = self.memory
        if goal != memory.desired:
            memory.raised = goal > memory.desired
            memory.coming = [*memory.coming, (now, goal - memory.desired)] if memory.raised else []
            memory.desired, memory.changed_at = goal, now
        return Decision(goal, kind, reason)

    def _keep(self, kind: Kind, reason: str) -> Decision:
        return Decision(self.memory.desired, kind, reason)


def _waits(measured: Measured) -> str:
    return f"the trainer waits {measured.wait:.0%} of its time"


def _missing(working: int, desired: int) -> str:
    return f"{desired - working} of {desired} replicas are not there yet"


def _rates(measured: Measured) -> str:
    """Demand and supply in words."""
    least, most = f"{measured.need:.1f}", f"{measured.most_needed:.1f}"
    held_back = f" with {1 - measured.throttled:.0%} of what it can hold" if measured.throttled >= 0.01 else ""
    return (
        f"it takes {measured.demand:.3g} groups/s while it works, a replica makes {measured.rate:.3g}{held_back}, "
        f"so {least if least == most else f'{least} to {most}'} would do"
    )
