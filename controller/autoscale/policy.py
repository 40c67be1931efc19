"""The decision: how many rollout replicas there should be now, and why. A state machine without a clock.

                 measured need (see `meter`)
                          │
    the trainer waits more than target_wait ──▶ more: need, at most twice as many at once
    need with headroom was lower for scale_down_delay ──▶ fewer: the highest need of that time
    else ──▶ as they are

More is limited by the maximum; by the bound, since no more than its groups can be under way at once; by both sides'
waiting for each other, which replicas cannot mend; and by the end of the job. Replicas of which the bound leaves each
only some of the groups that it could hold may or may not be faster with still fewer: that is tried, and taken back
where it made no difference. While nothing can be measured (paused,
an outage of rewards, no trainer) the number stays. It is 0 only when the job is over.

No flapping: where replicas were added although the need was met (waiting by chance, or slower with fewer groups), so
much headroom is kept from then on; the first way down after a way up is half of it, since a replica that the bound
holds back may be faster for each group than it will be when it holds more; and between two changes lies the time in
which the first one shows. What was remembered is forgotten after `FORGET`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from controller.autoscale.meter import Measured

HEADROOM = 1.03
"""Replicas over the measured need below which none is drained."""
MOST_HEADROOM = 4.0
TRIAL = 1.25
"""Times as many replicas at least where it is tried whether more are faster."""
TRIED = 0.25
"""Share of the gain in proportion to their number that has to be seen."""
SPEEDS = 1.1
"""Times the present number that the need must be before a change has shown, to add to it all the same."""
MOST_IDLE = 0.5
"""Share of their time that the bound may leave replicas without work, and more of them still help."""
FULL = 0.05
"""Share that the bound may refuse of what replicas could hold, and they are as busy as they can be."""
MOST_LOST = 1.5
"""Times the need that may be requested because replicas are missing all the time."""
FORGET = 3600.0
USUAL_START = 60.0
"""Seconds until a requested replica leases, before one was seen to do so."""
STARTS = 16
"""Starts whose median counts."""

Kind = Literal[
    "unknown",
    "enough",
    "settling",
    "more",
    "fewer",
    "limit",
    "bound",
    "both",
    "ending",
    "hold",
    "manual",
    "over",
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


@dataclass(frozen=True, slots=True)
class Seen:
    """The job now. working: replicas that lease. hold: why nothing can be decided; empty: it can.

    over: why no replica is needed any more; empty: some are. left: steps to train, if known.
    """

    measured: Measured | None
    working: int
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
class Memory:
    """What a decision leaves for later ones; stored. Times are those of the caller's clock. Its lists are replaced,
    never changed."""

    desired: int
    manual: int | None = None
    changed_at: float = 0.0
    raised: bool = True
    headroom: float = HEADROOM
    headroom_at: float = 0.0
    tried: list[float] = field(default_factory=list)
    """A trial: the number before it, and the groups per second that those made."""
    useful: int = 0
    """Beyond which more made no difference; 0: not known."""
    useful_at: float = 0.0
    starts: list[float] = field(default_factory=list)
    coming: list[tuple[float, int]] = field(default_factory=list)
    """Raises whose replicas have not leased yet: when, and how many."""

    def to_record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Memory:
        coming = [(float(at), int(count)) for at, count in record["coming"]]
        return cls(**{**record, "coming": coming})


class Autoscaler:
    """See the module's docstring."""

    def __init__(self, limits: Limits, memory: Memory) -> None:
        self.limits, self.memory = limits, memory
        self._needs: deque[tuple[float, int]] = deque()
        """Of the last `scale_down_delay` seconds: when, and how many would have done; falling."""
        self._watched_since: float | None = None
        self.last = Decision(memory.desired, "unknown", "nothing is measured yet")

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
        if replicas is not None and not limits.minimum <= replicas <= limits.maximum:
            raise ValueError(
                f"{replicas} replicas are out of range: autoscale.min_replicas = {limits.minimum}, "
                f"autoscale.max_replicas = {limits.maximum}"
            )
        self.memory.manual = replicas
        self._watch_anew()
        if replicas is None:
            self.last = Decision(self.memory.desired, "unknown", "the number follows the need again")
        else:
            self.last = self._set(now, replicas, "manual", f"{replicas} by request, until it is taken back")
        return self.last

    def decide(self, now: float, seen: Seen) -> Decision:
        """The number from now on."""
        self.last = self._decide(now, seen)
        return self.last

    def _decide(self, now: float, seen: Seen) -> Decision:
        memory, measured = self.memory, seen.measured
        if seen.over:
            return Decision(0, "over", seen.over)
        if memory.manual is not None:
            return self._set(
                now, memory.manual, "manual", f"{memory.manual} by request, until it is taken back"
            )
        if seen.hold:
            self._watch_anew()
            return self._keep("hold", seen.hold)
        if measured is None:
            return self._keep(
                "unknown", "nothing is measured yet: no step was trained, or no group was made since"
            )
        self._remember(now, measured)
        would_do = math.ceil(self._with_losses(measured, measured.need) * memory.headroom - 1e-6)
        self._note(now, would_do)
        if measured.wait > self.limits.target_wait:
            return self._more(now, seen, measured)
        enough_for = self._enough_for(now)
        if enough_for is not None and enough_for < memory.desired:
            return self._fewer(now, measured, enough_for)
        return self._keep(
            "enough", f"{_rates(measured)}, and the trainer waits {measured.wait:.0%} of its time: enough"
        )

    # ---- more ---------------------------------------------------------------------------------------------

    def _more(self, now: float, seen: Seen, measured: Measured) -> Decision:
        desired, limits = self.memory.desired, self.limits
        waits = f"the trainer waits {measured.wait:.0%} of its time"
        if measured.idle > MOST_IDLE:
            return self._keep(
                "both",
                f"{waits}, and the bound leaves replicas without work {measured.idle:.0%} of theirs: both wait for "
                f"each other, which allowed_outdated_steps = {limits.bound + 1} would mend, not more replicas",
            )
        goal = math.ceil(self._with_losses(measured, measured.most_needed) - 1e-6)
        settled = self._has_shown(measured)
        if settled and (in_vain := self._in_vain(now, measured)) is not None:
            return in_vain
        trial = measured.throttled > FULL
        if not settled and (trial or goal < desired * SPEEDS):
            return self._keep("settling", f"{waits}: waiting for what the last change does")
        by_need = goal > desired
        if not by_need:
            if seen.working < desired:
                missing = desired - seen.working
                return self._keep("settling", f"{waits}: {missing} of {desired} replicas are not there yet")
            goal = desired + max(1, math.ceil(desired * (measured.wait - limits.target_wait)))
        goal = min(max(goal, math.ceil(desired * TRIAL) if trial else 0), 2 * desired)
        most = min(limits.maximum, limits.groups, self.memory.useful or limits.maximum)
        if desired >= most:
            return self._keep(*self._limited(waits))
        goal = min(goal, most)
        takes = self.start_time + measured.lease_age
        if seen.left is not None and (ends := seen.left * measured.step_time) < takes:
            text = f"{waits}, but the job ends in about {ends:.0f} s, and a replica helps after {takes:.0f} s"
            return self._keep("ending", text)
        if trial:  # with more of them each will hold fewer groups, and look the less needed
            self.memory.tried = [desired, measured.supply]
            self._keep_headroom(now, goal / measured.need * goal / desired)
        elif not by_need:
            self._keep_headroom(now, goal / measured.need)
        return self._set(now, goal, "more", f"{waits}: {_rates(measured)}")

    def _limited(self, waits: str) -> tuple[Kind, str]:
        limits, useful = self.limits, self.memory.useful
        bound = f"the bound of {limits.bound} steps lets {limits.groups} groups be under way"
        if useful and useful <= min(limits.maximum, limits.groups):
            return "bound", f"{waits}, but {bound}, and more than {useful} replicas made no more of them"
        if limits.groups < limits.maximum:
            return "bound", f"{waits}, but {bound}: more replicas would have nothing to do"
        return "limit", f"{waits}, but autoscale.max_replicas = {limits.maximum}"

    def _in_vain(self, now: float, measured: Measured) -> Decision | None:
        """The end of a trial: back to the number before, if more replicas made hardly more."""
        memory = self.memory
        if not memory.tried:
            return None
        (before, made), memory.tried = memory.tried, []
        goal, expected = int(before), memory.desired / before - 1.0
        if goal >= memory.desired or measured.supply >= made * (1.0 + TRIED * expected):
            return None
        memory.useful, memory.useful_at, memory.headroom = goal, now, HEADROOM
        bound = self.limits.bound
        return self._set(
            now,
            goal,
            "bound",
            f"{memory.desired} replicas made {measured.supply:.3g} groups/s, {goal} made {made:.3g}: the bound of "
            f"{bound} steps lets {self.limits.groups} be under way; allowed_outdated_steps = {bound + 1} would help",
        )

    def _keep_headroom(self, now: float, headroom: float) -> None:
        self.memory.headroom = min(max(headroom, self.memory.headroom), MOST_HEADROOM)
        self.memory.headroom_at = now

    # ---- fewer --------------------------------------------------------------------------------------------

    def _fewer(self, now: float, measured: Measured, enough: int) -> Decision:
        memory = self.memory
        if not self._has_shown(measured):
            return self._keep("settling", "waiting for what the last change does")
        if memory.raised:
            enough = (memory.desired + enough) // 2
        goal = max(enough, self.limits.minimum, 1)
        if goal >= memory.desired:
            return self._keep("enough", f"{_rates(measured)}: enough")
        self._watch_anew()
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
        """What would have done for the last `scale_down_delay` seconds; None: not watched for so long."""
        since = self._watched_since
        if since is None or now - since < self.limits.scale_down_delay:
            return None
        return self._needs[0][1]

    def _watch_anew(self) -> None:
        self._needs.clear()
        self._watched_since = None

    # ---- both ---------------------------------------------------------------------------------------------

    def _remember(self, now: float, measured: Measured) -> None:
        memory = self.memory
        if now - memory.useful_at > FORGET:
            memory.useful = 0
        if now - memory.headroom_at > FORGET:
            memory.headroom = HEADROOM

    def _has_shown(self, measured: Measured) -> bool:
        """Whether the whole window lies behind the last change and what it took to happen."""
        memory = self.memory
        return measured.began >= memory.changed_at + (self.start_time if memory.raised else 0.0)

    def _with_losses(self, measured: Measured, need: float) -> float:
        """Replicas to request so that `need` are there, where some are missing all the time."""
        if not self._has_shown(measured) or measured.replicas <= 0:
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


def _rates(measured: Measured) -> str:
    """Demand and supply in words."""
    least, most = f"{measured.need:.1f}", f"{measured.most_needed:.1f}"
    held_back = (
        f" with {1 - measured.throttled:.0%} of what it can hold" if measured.throttled >= 0.01 else ""
    )
    return (
        f"it takes {measured.demand:.3g} groups/s while it works, a replica makes {measured.rate:.3g}{held_back}, "
        f"so {least if least == most else f'{least} to {most}'} would do"
    )
