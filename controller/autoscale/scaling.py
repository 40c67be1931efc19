"""From what is seen of a job to decisions: measures at every look, decides every `interval`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controller.autoscale.autoscaler import Autoscaler, Decision, Limits, PastDecisions, Seen
from controller.autoscale.meter import Measured, Meter, MeterLevels, Trainer

LEASES = 2.0
"""Lease ages that a window covers at least: after a change of the load replicas hold groups of both kinds."""
MARKS_PER_WINDOW = 8.0


@dataclass(frozen=True, slots=True)
class Sight:
    """The job at one moment.

    leasing: ids of rollout replicas that have leased and are there. held: groups leased. asked: groups that replicas
    ask for and the bound refuses. empty: replicas that ask in vain and hold none. ready, tokens: groups that ever
    became ready, and their generated tokens. stored: groups that are ready now. begins: whether no step was ever
    trained. hold, over, left: see `Seen`.
    """

    leasing: Iterable[str]
    held: int
    asked: int
    empty: int
    ready: int
    tokens: int
    stored: int = 0
    begins: bool = False
    hold: str = ""
    over: str = ""
    left: int | None = None


class ReplicaScaling:
    """See the module's docstring. interval: seconds."""

    def __init__(self, limits: Limits, interval: float, memory: PastDecisions, now: float) -> None:
        self.autoscaler = Autoscaler(limits, memory)
        self.interval = interval
        self.measured: Measured | None = None
        """The measurement of the last decision."""
        self._meter = Meter(now)
        self._decided_at = now
        self._known: set[str] | None = None
        self._lease_age = 0.0

    @property
    def working(self) -> int:
        """Rollout replicas that lease, as last seen."""
        return len(self._known or ())

    def trainer(self, now: float, does: Trainer) -> None:
        """Note what the trainer does from now on."""
        self._meter.trainer(now, does)

    def committed(self, now: float, groups: int) -> None:
        """A step of so many groups was trained."""
        self._meter.committed(now, groups, self.interval / MARKS_PER_WINDOW)

    def restart(self) -> None:
        """The job goes back to an earlier step."""
        self._meter.restart()

    def look(self, now: float, sight: Sight) -> Decision | None:
        """Measure; the decision, when one is due."""
        self._meet(now, set(sight.leasing))
        levels = None if sight.hold else self._levels(sight)
        self._meter.look(now, levels, sight.ready, sight.tokens)
        if now - self._decided_at < self.interval and not sight.over:
            return None
        self._decided_at = now
        return self._decide(now, sight)

    def _levels(self, sight: Sight) -> MeterLevels:
        late = sight.stored >= self.autoscaler.limits.batch
        return MeterLevels(sight.held, sight.asked, self.working, sight.empty, late)

    def _meet(self, now: float, leasing: set[str]) -> None:
        """Note who is there; who came since the last look is a start that was waited for."""
        if self._known is not None:
            self.autoscaler.joined(now, len(leasing - self._known))
        self._known = leasing

    def _decide(self, now: float, sight: Sight) -> Decision:
        hold = sight.hold
        if not hold and self._meter.is_away:
            hold = "no trainer asks for samples"
        self.measured = self._meter.window(now, max(self.interval, LEASES * self._lease_age))
        if self.measured is not None:
            self._lease_age = self.measured.lease_age
        beginning = self._meter.beginning(now) if sight.begins else None
        seen = Seen(self.measured, self.working, beginning, hold, sight.over, sight.left)
        return self.autoscaler.decide(now, seen)
