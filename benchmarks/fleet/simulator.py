"""Events of one job: groups are leased, made and trained; replicas come and go; the controller fails and is back.

Ledger and autoscaler are the real ones. A group is one sample here: its longest. An engine with c groups makes
r · c / (c + half) tokens per second, shared evenly, so each group has the same speed at a time: a replica's
`progress` is the tokens that a group present all the time would have, and a group ends when it has grown by
its length.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.fleet.hpa import SYNC_S, Hpa
from benchmarks.fleet.scenario import RANK_SPREAD, RANKS, SLOWEST, TOKENS, Scenario
from controller.autoscale.autoscaler import Decision, Limits, PastDecisions
from controller.autoscale.scaling import ReplicaScaling, Sight
from controller.ledger.assembly import Assembled
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.values import LedgerParams
from schema.wire.sample import SampleHeader

POLL_S = 20.0
"""An open lease request is repeated so often, and then asks for all the room that there is by then."""
AHEAD = 0.25
"""Share of the slots that may be empty before a replica asks (as `rollout_worker.groups.leasing`)."""
BIN = 30.0
"""Seconds of a point of the curves."""


class Replica:
    """An engine and its leases."""

    __slots__ = ("asks", "at", "draining", "groups", "name", "progress", "token")

    def __init__(self, name: str, now: float) -> None:
        self.name, self.at = name, now
        self.groups: list[tuple[float, str, str, int, int]] = []
        """A heap: progress at its end, group, lease, version at the lease, tokens."""
        self.progress, self.token, self.asks, self.draining = 0.0, 0, 0, False


@dataclass
class Point:
    """`BIN` seconds of the run."""

    at: float
    need: float
    desired: int
    working: int
    alive: int
    waited: float = 0.0
    worked: float = 0.0


@dataclass
class Result:
    """What came of a run; costs and groups are those after the warm-up."""

    points: list[Point] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    trained: int = 0
    replica_s: float = 0.0
    waited: float = 0.0
    worked: float = 0.0
    over_bound: int = 0
    max_staleness: int = 0
    lease_age: float = 0.0
    start_time: float = 0.0

    @property
    def cost(self) -> float:
        """Replica-seconds of a trained group."""
        return self.replica_s / max(1, self.trained)

    @property
    def idle(self) -> float:
        return self.waited / max(1e-9, self.waited + self.worked)


class Simulator:
    """fixed: replicas all the time, without an autoscaler; None: it decides."""

    def __init__(self, scenario: Scenario, fixed: int | None = None) -> None:
        self.scenario, self.fixed = scenario, fixed
        self.random = random.Random(scenario.seed)
        self.now, self._numbers = 0.0, count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.params = LedgerParams(
            groups_per_step=scenario.groups_per_step,
            n_samples=1,
            staleness_bound=scenario.bound,
            n_positions=10**9,
            lease_timeout=600.0,
        )
        leases = count()
        self.ledger = Ledger(GroupTable(self.params), lambda: f"l{next(leases)}")
        self.published = 0
        self.fleet: dict[str, Replica] = {}
        self.leasing: set[str] = set()
        self.asked = 0
        self.waiting: deque[Replica] = deque()
        self.starting: dict[str, float] = {}
        self.draining = 0
        self.desired = fixed if fixed is not None else scenario.initial or round(scenario.needed(0.0)) or 1
        self.obeyed = self.desired
        """What the platform has been told."""
        self._back_at = 0.0
        """When the controller is there again."""
        self._trainer, self._trainer_since, self._run = "waits", 0.0, 0
        self._cost_at, self._drift = 0.0, 0.0
        self.result = Result()
        self._waited_from: tuple[float, float] = (0.0, 0.0)
        self.scaling = self._scaling(PastDecisions(self.desired))
        self.scaling.trainer(0.0, "waits")

    def _scaling(self, memory: PastDecisions) -> ReplicaScaling:
        s = self.scenario
        groups = (s.bound + 1) * self.params.slots
        limits = Limits(s.minimum, s.maximum, s.target_wait, s.scale_down_delay, groups, s.bound)
        return ReplicaScaling(limits, s.interval, memory, self.now)

    # ---- clock --------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what, args))

    def run(self) -> Result:
        scenario = self.scenario
        self._look()
        for _ in range(min(self.desired, scenario.delivers)):
            self._arrive(f"r{next(self._numbers)}")
        for begin, seconds in scenario.outages:
            self.at(begin, self._outage, seconds)
        for begin, seconds in scenario.away:
            self.at(begin, self._lose_trainer, seconds)
        for what in (self._poll, self._sample, self._assemble, self._sync):
            self.at(0.0, what)
        events, end = self._events, scenario.seconds
        while events and events[0][0] <= end:
            self.now, _, what, args = heapq.heappop(events)
            what(*args)
        return self._finish()

    def _is_down(self, what: Callable[..., None], *args: Any) -> bool:
        """A call to the controller while it is down is made when it is back."""
        if self.now >= self._back_at:
            return False
        self.at(self._back_at, what, *args)
        return True

    # ---- engines ------------------------------------------------------------------------------------------

    def _advance(self, replica: Replica) -> None:
        """What its groups have grown by until now; `at` lies ahead while it loads weights."""
        passed = self.now - replica.at
        if passed > 0.0:
            if replica.groups:
                replica.progress += passed * self._speed(replica)
            replica.at = self.now

    def _speed(self, replica: Replica) -> float:
        """Tokens per second of one group."""
        return self.scenario.tokens_per_s / (len(replica.groups) + self.scenario.half)

    def _schedule(self, replica: Replica) -> None:
        replica.token += 1
        if replica.groups:
            left = max(0.0, replica.groups[0][0] - replica.progress)
            self.at(replica.at + left / self._speed(replica), self._end_group, replica, replica.token)

    def _end_group(self, replica: Replica, token: int) -> None:
        if token != replica.token:
            return
        self._advance(replica)
        replica.progress = max(replica.progress, replica.groups[0][0])
        _, group, lease, version, tokens = heapq.heappop(replica.groups)
        self._schedule(replica)
        self._push(replica, group, lease, version, tokens)

    def _push(self, replica: Replica, group: str, lease: str, version: int, tokens: int) -> None:
        if self._is_down(self._push, replica, group, lease, version, tokens):
            return
        header = SampleHeader(
            index=0, prompt_tokens=1, response_tokens=tokens, total_tokens=tokens + 1, oldest_version=version,
            newest_version=max(version, self.published), finish_reason="stop", rewards={"r": 1.0}, score=1.0,
        )  # fmt: skip
        self.ledger.push(group, lease, 0, header, 100)
        if self._trainer == "waits" and self.ledger.table.ready >= self.params.groups_per_step:
            self._assemble()
        if replica.name not in self.fleet:
            return
        if replica.draining:
            if not replica.groups:
                self._leave(replica)
        elif not replica.asks:
            self._ask(replica)

    def _room(self, replica: Replica) -> int:
        room, slots = self.scenario.slots - len(replica.groups), self.scenario.slots
        return room if room >= max(1, int(AHEAD * slots)) or not replica.groups else 0

    def _ask(self, replica: Replica) -> None:
        """Ask for what fits; a refused request stays open, and who waits longer comes first to its share."""
        if replica.name not in self.fleet or replica.draining or replica.asks:
            return
        if self._is_down(self._ask, replica):
            return
        while room := self._room(replica):
            share = room
            if self.waiting:
                share = min(room, self.ledger.level(len(self.waiting) + 1) - len(replica.groups))
            if share <= 0 or not self._lease(replica, share):
                replica.asks = room
                self.asked += room
                self.waiting.append(replica)
                return

    def _lease(self, replica: Replica, room: int) -> bool:
        request = f"q{next(self._numbers)}"
        found = self.ledger.lease(replica.name, request, self.published, self.published, room, self.now)
        if not found.groups:
            return False
        self._advance(replica)
        mean = TOKENS * self.scenario.length(self.now) * pow(2.718281828, self._drift)
        for group in found.groups:
            tail = self.scenario.tail
            tokens = max(1, int(mean * self.random.lognormvariate(-tail * tail / 2, tail)))
            entry = (replica.progress + tokens, group.id, group.lease_id or "", self.published, tokens)
            heapq.heappush(replica.groups, entry)
        self.leasing.add(replica.name)
        self._schedule(replica)
        return True

    def _serve(self) -> None:
        """Open requests, who waits longest first, each for its share, until one is refused."""
        waiting = self.waiting
        for _ in range(len(waiting)):
            if not self.ledger.room:
                return
            replica = waiting.popleft()
            if not replica.asks or replica.name not in self.fleet or replica.draining:
                self._withdraw(replica)
                continue
            share = self.ledger.level(len(waiting) + 1) - len(replica.groups)
            if share > 0 and not self._lease(replica, min(replica.asks, share)):
                waiting.appendleft(replica)
                return
            if share > 0:
                self._withdraw(replica)
                self._ask(replica)
            else:
                waiting.append(replica)

    def _withdraw(self, replica: Replica) -> None:
        self.asked -= replica.asks
        replica.asks = 0

    def _poll(self) -> None:
        """Open requests are repeated, for all the room that there is now."""
        self.at(self.now + POLL_S, self._poll)
        for replica in self.waiting:
            if replica.asks:
                room = max(replica.asks, self.scenario.slots - len(replica.groups))
                self.asked += room - replica.asks
                replica.asks = room

    # ---- trainer ------------------------------------------------------------------------------------------

    def _does(self, what: str) -> None:
        self._count_trainer()
        self._trainer = what
        self.scaling.trainer(self.now, what)  # type: ignore[arg-type]

    def _count_trainer(self) -> None:
        """Into the present point. What it waits for a controller is not counted."""
        passed, self._trainer_since = self.now - self._trainer_since, self.now
        if not self.result.points or self.now < self._back_at:
            return
        point = self.result.points[-1]
        if self._trainer == "waits":
            point.waited += passed
        elif self._trainer == "works":
            point.worked += passed

    def _assemble(self) -> None:
        if self._trainer == "away" or self._is_down(self._assemble):
            return
        found = self.ledger.assemble(self.now)
        if not isinstance(found, Assembled):
            if self._trainer != "waits":
                self._does("waits")
            return
        self._does("works")
        scenario, rng = self.scenario, self.random
        slowest = max(rng.lognormvariate(0.0, RANK_SPREAD) for _ in range(RANKS)) / SLOWEST
        jitter = rng.lognormvariate(-(scenario.jitter**2) / 2, scenario.jitter)
        seconds = scenario.step_s * scenario.step(self.now) * slowest * jitter
        self.at(self.now + seconds, self._commit, found.step, self._run)
        self._serve()

    def _commit(self, step: int, run: int) -> None:
        if run != self._run or self._is_down(self._commit, step, run):
            return
        self.ledger.commit(step)
        if step % 20 == 0:
            self.ledger.checkpoint(step)
        self.ledger.table.take_changes()
        self.scaling.committed(self.now, self.params.groups_per_step)
        if self.now >= self.scenario.warm_up:
            self.result.trained += self.params.groups_per_step
        self.at(self.now + self.scenario.publish_s, self._publish, step + 1)
        self._does("waits")
        self._assemble()
        self._serve()

    def _publish(self, version: int) -> None:
        if self._is_down(self._publish, version):
            return
        self.published = max(self.published, version)
        update = self.scenario.update_s
        for replica in self.fleet.values():
            self._advance(replica)
            replica.at = max(replica.at, self.now + update)
            self._schedule(replica)
        self._serve()

    def _lose_trainer(self, seconds: float) -> None:
        self._does("away")
        self._run += 1
        self.ledger.table.abandon_step()
        self.at(self.now + seconds, self._find_trainer)

    def _find_trainer(self) -> None:
        self._does("waits")
        self._assemble()

    # ---- controller ---------------------------------------------------------------------------------------

    def _outage(self, seconds: float) -> None:
        """The autoscaler's memory survives, and nothing else of it."""
        self._count_trainer()
        self._back_at = self.now + seconds
        self.at(self._back_at, self._restart, json.dumps(self.scaling.autoscaler.memory.to_record()), seconds)

    def _restart(self, record: str, seconds: float) -> None:
        self._trainer_since = self.now
        self.ledger.extend_leases(seconds, self.now)
        self.ledger.became_ready = self.ledger.ready_tokens = 0
        self.scaling = self._scaling(PastDecisions.from_record(json.loads(record)))
        self.scaling.trainer(self.now, self._trainer)  # type: ignore[arg-type]

    def _look(self) -> None:
        self.at(self.now + self.scenario.look_s, self._look)
        if self.fixed is not None or self.now < self._back_at:
            return
        held = len(self.ledger.table.by_lease)
        ledger = self.ledger
        empty = sum(replica.asks > 0 and not replica.groups for replica in self.waiting)
        counts = ledger.became_ready, ledger.ready_tokens, ledger.table.ready, not ledger.table.committed
        sight = Sight(self.leasing, held, self.asked, empty, *counts)
        decision = self.scaling.look(self.now, sight)
        if decision is None:
            return
        if not self.result.decisions or self.result.decisions[-1][1] != decision:
            self.result.decisions.append((self.now, decision))
        if decision.desired != self.desired:
            self.desired = decision.desired
            if self.scenario.tolerance is None:
                self._obey(self.desired)

    # ---- platform -----------------------------------------------------------------------------------------

    @property
    def alive(self) -> int:
        return len(self.fleet) + len(self.starting)

    def _pay(self) -> None:
        """Replica-seconds until now, of those that start or drain, too."""
        begin = max(self._cost_at, self.scenario.warm_up)
        if self.now > begin:
            self.result.replica_s += (self.now - begin) * self.alive
        self._cost_at = self.now

    def _sync(self) -> None:
        """The look of a HorizontalPodAutoscaler; a controller that is away has no number."""
        scenario = self.scenario
        if scenario.tolerance is None or self.fixed is not None:
            return
        self.at(self.now + SYNC_S, self._sync)
        hpa = Hpa(scenario.minimum, scenario.maximum, scenario.tolerance)
        metric = self.desired if self.now >= self._back_at else None
        self._obey(hpa.replicas(self.obeyed, metric))

    def _obey(self, number: int) -> None:
        if number != self.obeyed:
            self.obeyed = number
            self._reconcile()

    def _reconcile(self) -> None:
        """As many replicas as it was told: start some, or cancel starts and drain the rest."""
        self._pay()
        scenario = self.scenario
        size = self.alive - self.draining
        while size < min(self.obeyed, scenario.delivers):
            name = f"r{next(self._numbers)}"
            self.starting[name] = self.now
            seconds = scenario.start_s * self.random.lognormvariate(0.0, scenario.start_spread)
            self.at(self.now + seconds, self._started, name)
            size += 1
        while size > self.obeyed and self.starting:
            self.starting.popitem()
            size -= 1
        if size > self.obeyed:
            serving = [replica for replica in self.fleet.values() if not replica.draining]
            for replica in sorted(serving, key=lambda replica: len(replica.groups))[: size - self.obeyed]:
                replica.draining = True
                self.draining += 1
                self._withdraw(replica)
                if not replica.groups:
                    self._leave(replica)

    def _started(self, name: str) -> None:
        if name in self.starting:
            self._pay()
            del self.starting[name]
            self._arrive(name)

    def _arrive(self, name: str) -> None:
        replica = self.fleet[name] = Replica(name, self.now)
        if self.scenario.lost_per_hour:
            lives = self.random.expovariate(self.scenario.lost_per_hour / 3600.0)
            self.at(self.now + lives, self._preempt, name)
        self._ask(replica)

    def _preempt(self, name: str) -> None:
        replica = self.fleet.get(name)
        if replica is None:
            return
        self._leave(replica)
        self._release(name)
        self._reconcile()

    def _release(self, name: str) -> None:
        if self._is_down(self._release, name):
            return
        self.ledger.replica_gone(name, failed=False)
        self._serve()

    def _leave(self, replica: Replica) -> None:
        self._pay()
        self.draining -= replica.draining
        self._withdraw(replica)
        replica.token += 1
        del self.fleet[replica.name]
        self.leasing.discard(replica.name)

    # ---- results ------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        self.at(self.now + BIN, self._sample)
        self._count_trainer()
        scenario = self.scenario
        if scenario.drift and self.now % 60.0 == 0.0:  # 10 minutes of memory
            self._drift = 0.905 * self._drift + scenario.drift * 0.425 * self.random.gauss(0.0, 1.0)
        point = Point(self.now, scenario.needed(self.now), self.desired, len(self.leasing), self.alive)
        self.result.points.append(point)

    def _finish(self) -> Result:
        self._pay()
        self._count_trainer()
        result, totals = self.result, self.ledger.table.totals
        late = [point for point in result.points if point.at >= self.scenario.warm_up]
        result.waited, result.worked = sum(p.waited for p in late), sum(p.worked for p in late)
        result.over_bound, result.max_staleness = totals.over_bound, max(totals.staleness, default=0)
        result.start_time = self.scaling.autoscaler.start_time
        measured = self.scaling.measured
        result.lease_age = measured.lease_age if measured is not None else self.scenario.group_s
        return result
