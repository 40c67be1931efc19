"""A whole job in one deterministic process: replicas, trainer, store and controller as random events.

Every event is one thing that can happen in a real run: a lease request (sometimes repeated), a push (sometimes
duplicated, late, or with a failed reward), a heartbeat that forgets leases, a crash, a successor under the same name,
an expiry, a weight update in the middle of a group, an assembly, a commit, a lost trainer, a checkpoint, trainers
that die in a row before the next one, a restart of the controller from what it had written, by a clock that is set
otherwise; once, that all rows are prepared, where the job began with a part of them. After each, `check` asserts the
invariants of the ledger.

What was trained is known here, step by step (`history`): that decides which checkpoints the ledger contains, and
what its totals must be.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from controller.ledger.assembly import Assembled
from controller.ledger.group import DropReason, Group, GroupState, parse_group_id
from controller.ledger.group_table import GroupTable
from controller.ledger.rejoin import adopt
from controller.ledger.values import LedgerParams
from schema.wire.messages import HeldLease, LedgerSnapshot
from schema.wire.sample import SampleHeader
from tests.support.ledger import StoredLedger, schedulable, score_of


@dataclass
class Replica:
    name: str
    version: int
    leases: dict[str, str] = field(default_factory=dict)  # group id -> lease id
    last_request: str = ""


@dataclass(frozen=True)
class Step:
    """One step as it was trained: no other one has its number."""

    number: int
    groups: tuple[str, ...]
    staleness: Counter[int]


@dataclass(frozen=True)
class Checkpoint:
    timeline: int
    history: list[Step]
    snapshot: LedgerSnapshot | None = None

    @property
    def step(self) -> int:
        return len(self.history)


class Simulation:
    """Drives a ledger by a seeded random schedule. `run` returns when the job has finished."""

    probes = 0.2
    """Share of leases that are probes, as in an outage of rewards."""
    flat: int | None = None
    """A source most of whose groups have no signal."""

    def __init__(self, seed: int, params: LedgerParams, n_replicas: int, whole: LedgerParams | None = None) -> None:
        """whole: the parameters once all rows are prepared, where `params` are of a part of them."""
        self.random = random.Random(seed)
        self.params, self.whole = params, whole
        self.sync_interval = 1 + seed % (params.staleness_bound + 1)
        """Steps from one publication to the next."""
        self.stored = StoredLedger()
        self.ledger = self.stored.with_orders(GroupTable(params), self._lease_id)
        self.rows: dict[str, tuple[int, int, int]] = {}
        """Which row each group was made of."""
        self.replicas = [Replica(f"r{i}", 0) for i in range(n_replicas)]
        self.published = 0
        self.checkpoints = [Checkpoint(0, [])]
        self.now = 0.0
        self.history: list[Step] = []
        self.numbers = count()
        self.begun_anew = 0
        self.superseded: list[str] = []
        self.filtered = 0
        """Groups dropped by the filter since a step was assembled last."""
        self.events = self.expired = 0

    @property
    def trained(self) -> dict[str, int]:
        """Group id -> step, of the present timeline."""
        return {name: at for at, step in enumerate(self.history) for name in step.groups}

    @contextmanager
    def costs_nothing(self) -> Iterator[None]:
        """A pre-emption costs no group an attempt."""

        def attempts() -> dict[str, tuple[int, int, str | None]]:
            groups = self.ledger.table.groups.items()
            return {name: (group.crashes, group.failures, group.reason) for name, group in groups}

        before = attempts()
        yield
        assert attempts() == before

    def _lease_id(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    # ---- events -------------------------------------------------------------------------------------------

    def lease(self) -> None:
        replica = self.random.choice(self.replicas)
        repeat = replica.last_request and self.random.random() < 0.1
        request = replica.last_request if repeat else self._lease_id()
        replica.last_request = request
        n, probe = self.random.randint(1, 4), self.random.random() < self.probes
        decision = self.ledger.lease(replica.name, request, replica.version, self.published, n, self.now, probe=probe)
        for group in decision.groups:
            assert group.lease_id is not None
            replica.leases[group.id] = group.lease_id
            row = self.ledger.table.row_of(group)
            assert self.rows.setdefault(group.id, row) == row, "a group is made of another row"
        if decision.refusal is not None and decision.refusal.update:
            assert replica.version < self.published, "an update was asked for, but there is none"

    def push(self) -> None:
        replica = self.random.choice(self.replicas)
        if not replica.leases:
            return
        name, lease_id = self.random.choice(sorted(replica.leases.items()))
        group = self.ledger.table.groups.get(name)
        done = set(group.samples) if group is not None and group.lease_id == lease_id else set()
        missing = [i for i in range(self.params.group_size) if i not in done]
        if not missing:
            del replica.leases[name]
            return
        index = self.random.choice(missing)
        holder = group.lease_id if group is not None and group.state is GroupState.LEASED else None
        header = self._header(index, group, replica)
        outage = self.random.random() < 0.3
        outcome = self.ledger.push(name, lease_id, index, header, 100, outage=outage)
        if outcome.accepted and not outcome.duplicate:
            assert group is not None
            assert lease_id in (holder, group.completed_lease), "counted under a lease that has ended"
            self.stored.payloads.add((name, f"{lease_id}.{index}"))
            self.filtered += group.reason is DropReason.ZERO_VARIANCE
        if outcome.accepted and self.random.random() < 0.1:
            assert self.ledger.push(name, lease_id, index, header, 100).duplicate
        if not outcome.accepted:
            replica.leases.pop(name)

    def _header(self, index: int, group: Group | None, replica: Replica) -> SampleHeader:
        oldest = min(group.lease_version if group is not None else 0, replica.version)
        oldest = self.random.randint(max(oldest, 0), replica.version)
        failed = self.random.random() < 0.01
        return SampleHeader(
            index=index, prompt_tokens=1, response_tokens=1, total_tokens=2, oldest_version=oldest,
            newest_version=replica.version,
            finish_reason="overlong" if self.random.random() < 0.02 else "stop",
            rewards={"r": self._reward(group)}, score=None if failed else score_of(group.id if group else "", index),
            error="ValueError: simulated" if failed else None, outage=failed and self.random.random() < 0.5,
            baseline=index == self.params.baseline,
        )  # fmt: skip

    def _reward(self, group: Group | None) -> float:
        """Return the reward of a sample: groups of the flat source get the same for all, most of the time."""
        if self.flat is not None and group is not None and group.source == self.flat and group.position % 4:
            return 1.0
        return float(self.random.randint(0, 3))

    def beat(self) -> None:
        replica = self.random.choice(self.replicas)
        held = [lease for lease in replica.leases.values() if self.random.random() < 0.95]
        lost = set(self.ledger.renew(replica.name, held, self.now))
        replica.leases = {name: lease for name, lease in replica.leases.items() if lease not in lost}

    def update(self) -> None:
        replica = self.random.choice(self.replicas)
        replica.version = self.published

    def crash(self) -> None:
        replica = self.random.choice(self.replicas)
        if self.random.random() < 0.5:
            self.ledger.replica_gone(replica.name, failed=self.random.random() < 0.2)
        if self.random.random() < 0.5:  # else it was only cut off, and goes on pushing under its old leases
            replica.leases.clear()
        replica.version = self.published

    def adopt(self, replica_id: str, held: list[HeldLease]) -> list[str]:
        return adopt(self.ledger.table, replica_id, held, self.now)

    def supersede(self) -> None:
        """A replica is back under its name before anybody missed it, and holds some of its leases still."""
        replica = self.random.choice(self.replicas)
        old, replica.name = replica.name, f"{replica.name.partition('.')[0]}.{self.events}"
        replica.leases = {name: lease for name, lease in replica.leases.items() if self.random.random() < 0.5}
        held = [HeldLease(group_id=name, lease_id=lease) for name, lease in replica.leases.items()]
        with self.costs_nothing():
            lost = self.adopt(replica.name, held)
            self.superseded = [group.id for group in self.ledger.table.held_by(old)]
            self.ledger.replica_gone(old, failed=False)
        replica.leases = {name: lease for name, lease in replica.leases.items() if lease not in lost}

    def report(self) -> None:
        """Somebody says that the replica which was superseded last had crashed."""
        groups = self.ledger.table.groups
        before = {name: groups[name].crashes for name in self.superseded if name in groups}
        self.ledger.blame(self.superseded)
        costs = {name: groups[name].crashes - crashes for name, crashes in before.items()}
        assert set(costs.values()) <= {0, 1}
        self.superseded = []

    def release(self) -> None:
        replica = self.random.choice(self.replicas)
        for name in list(replica.leases):
            with self.costs_nothing():
                self.ledger.release(replica.leases.pop(name))

    def expire(self) -> None:
        silence = 2.0 if self.random.random() < 0.1 else self.random.uniform(0.0, 1 / 3)
        self.now += silence * self.params.lease_timeout
        with self.costs_nothing():
            self.expired += self.ledger.expire(self.now)

    def step(self) -> None:
        is_new = self.ledger.batch(self.ledger.table.committed) is None
        result = self.ledger.assemble(self.now)
        if not isinstance(result, Assembled):
            return
        self.filtered = 0 if is_new else self.filtered
        for group in result.groups:
            for part in group.parts():
                assert (group.id, part) in self.stored.payloads, "a batch names a payload that is gone"
        if self.random.random() < 0.1:
            self.ledger.table.abandon_step()
            return
        if self.random.random() < 0.3:
            return  # still training: other events happen while the step is batched
        trained, staleness = self.trained, Counter[int]()
        for group in result.groups:
            assert group.id not in trained, f"{group.id} would be trained twice"
            assert result.step - group.oldest_version() <= self.params.staleness_bound
            usable = [meta for meta in group.samples.values() if meta.usable and not meta.baseline]
            assert usable
            greedy = [meta.usable for meta in group.samples.values() if meta.baseline]
            assert greedy == [True] * self.params.greedy, "a group without the score of its greedy sample"
            staleness.update(result.step - meta.oldest_version(result.step) for meta in usable)
        self.history.append(Step(next(self.numbers), tuple(group.id for group in result.groups), staleness))
        self.ledger.commit(result.step)
        assert not self.ledger.commit(result.step)
        if self.ledger.table.committed % self.sync_interval == 0 or self.ledger.table.finished:
            self.published = self.ledger.table.committed

    def checkpoint(self) -> None:
        step = self.random.randint(self.ledger.table.durable, self.ledger.table.committed)
        snapshot = self.ledger.snapshot(step)
        assert snapshot.staleness == _staleness(self.history[:step])
        self.ledger.checkpoint(step)
        self.checkpoints.append(Checkpoint(snapshot.timeline, self.history[:step], snapshot))

    def die(self) -> None:
        """The trainer dies, perhaps three times in a row from the same checkpoint, and trains a little meanwhile."""
        usual = [self.lease, self.push, self.push, self.push, self.step]
        newest = self.random.random() < 0.8  # else a user resumes from an older one
        back_to = self.checkpoints[-1] if newest else self.random.choice(self.checkpoints)
        for _ in range(self.random.choice([1, 1, 3])):
            self.start_trainer(back_to)
            for _ in range(self.random.randint(0, 30)):
                self.random.choice(usual)()
                self.stored.write(self.ledger)

    def start_trainer(self, found: Checkpoint) -> None:
        """From a checkpoint, as `controller.services.replicas` does."""
        ledger, step = self.ledger, found.step
        ledger.table.abandon_step()
        lineage = ledger.table.lineage
        contained = lineage.contains(step, found.timeline, ledger.table.committed)
        # Of what was before its snapshot, a ledger that began from one knows the snapshot's timeline and step alone.
        known = step >= lineage.floor and (found.timeline == lineage.source or found.timeline >= lineage.first)
        assert contained == (self.history[:step] == found.history and (not step or known))
        if not contained:
            assert found.snapshot is not None
            self.begun_anew += 1
            ledger.begin_from(found.snapshot)
            self.filtered = 0
        elif step < ledger.table.committed:
            ledger.rewind(step)
            self.filtered = 0
        self.history = found.history[:]
        self.published = step
        for name, group in ledger.table.groups.items():
            if group.state not in (GroupState.TRAINED, GroupState.DURABLE, GroupState.DROPPED):
                assert group.newest_version() <= step, f"{name} has tokens of a timeline that is gone"
        for replica in self.replicas:
            if replica.version > step:  # it holds weights of the lost timeline: it must load the new ones
                replica.version = step
        self.check_history()

    def restart(self) -> None:
        """The controller dies and rebuilds itself from what it had written, by a clock that is set otherwise."""
        self.stored.write(self.ledger)
        before = self.ledger.table.status()
        left = {group.id: group.expires - self.now for group in self.ledger.table.in_state(GroupState.LEASED)}
        self.ledger = self.stored.restore(self.params, self._lease_id)
        jump = self.random.choice([1.0, 3600.0, -3600.0])
        self.now += jump
        self.ledger.extend_leases(jump, self.now)
        assert self.ledger.expire(self.now) == 0, "a lease expires by the clock"
        for group in self.ledger.table.in_state(GroupState.LEASED):
            assert abs(group.expires - self.now - left[group.id]) < 1e-6
        now = self.ledger.table.status()
        assert now.model_copy(update={"sources": before.sources}) == before
        self.check_history()

    def resume_from_snapshot(self) -> None:
        """Everything dies; the job goes on from a checkpoint with an empty store."""
        self.ledger.table.abandon_step()
        snapshot = self.ledger.snapshot(self.ledger.table.committed)
        self.stored, self.filtered = StoredLedger(), 0
        self.ledger = self.stored.with_orders(GroupTable(self.params), self._lease_id)
        self.ledger.begin_from(snapshot)
        # The order of a pass that this history has not begun is decided anew, though another one had begun it.
        known = self.ledger.table.passes.knows
        places = {name: parse_group_id(name) or (0, 0, 0) for name in self.rows}
        self.rows = {name: row for name, row in self.rows.items() if known(places[name][0], places[name][2])}
        self.checkpoints.append(Checkpoint(snapshot.timeline, self.history[:], snapshot))
        self.published = self.ledger.table.committed
        for replica in self.replicas:
            replica.version = min(replica.version, self.published)
            replica.leases.clear()

    def grow(self) -> None:
        """All rows are prepared, which the controller sees as it runs or when it is started again."""
        if self.whole is None:
            return
        status, self.params, self.whole = self.ledger.table.status(), self.whole, None
        if self.random.random() < 0.5:
            self.restart()
        else:
            self.ledger.table.grow(self.params)
        now = self.ledger.table.status()
        assert (now.created, now.states, now.dropped) == (status.created, status.states, status.dropped)

    # ---- the run ------------------------------------------------------------------------------------------

    def check(self) -> None:
        ledger = self.ledger
        status = ledger.table.status()
        assert sum(status.states.values()) == status.created == ledger.table.frontier
        assert sum(status.dropped.values()) == status.states["dropped"]
        counted = [*ledger.table.in_state(GroupState.LEASED), *ledger.table.in_state(GroupState.READY)]
        assert ledger.table.deadlines == Counter(group.deadline for group in counted)
        if self.params.oversample == 1.0:
            assert schedulable(ledger.table.deadlines, ledger.table.first_step, self.params.groups_per_step)
            assert ledger.table.outstanding <= (self.params.staleness_bound + 1) * self.params.groups_per_step
        assert ledger.table.filtered == self.filtered
        assert status.max_staleness <= self.params.staleness_bound
        assert status.over_bound == 0
        assert status.staleness == _staleness(self.history), "the totals are of other samples than were trained"

    def check_history(self) -> None:
        """Every step is in the record, but those that only a snapshot tells of."""
        assert self.ledger.table.committed == len(self.history)
        for name, step in self.trained.items():
            group = self.ledger.table.find(name)
            if step >= self.ledger.table.lineage.floor:
                assert group is not None
                assert (group.state in (GroupState.TRAINED, GroupState.DURABLE), group.step) == (True, step)

    def run(self, chaos: float, max_events: int = 20_000) -> None:
        """Random events until the job is finished; `chaos` scales how often something breaks."""
        usual = [(self.lease, 6.0), (self.push, 30.0), (self.beat, 2.0), (self.update, 3.0), (self.step, 6.0)]
        broken = [
            (self.crash, 1.0), (self.release, 0.5), (self.expire, 0.5), (self.checkpoint, 0.5),
            (self.die, 0.1), (self.restart, 0.5), (self.resume_from_snapshot, 0.05), (self.supersede, 0.3),
            (self.report, 0.1),
        ]  # fmt: skip
        if self.whole is not None:
            usual.append((self.grow, 0.1))
        while not self.ledger.table.finished:
            self.events += 1
            assert self.events <= max_events, "the job does not come to its end"
            calm = self.events > max_events // 2  # liveness: once nothing breaks any more, the job must end
            weights = [w for _, w in usual] + [0.0 if calm else w * chaos for _, w in broken]
            (event,) = self.random.choices([e for e, _ in usual + broken], weights)
            event()
            self.stored.write(self.ledger)
            self.check()
        self.check_history()
        status = self.ledger.table.status()
        done = status.states["trained"] + status.states["durable"] + status.states["dropped"]
        if self.params.max_steps is None:
            table = self.ledger.table
            assert (done, table.unleased) == (table.frontier, False), "a position was neither trained nor dropped"


def _staleness(steps: list[Step]) -> dict[int, int]:
    return dict(sorted(sum((step.staleness for step in steps), Counter[int]()).items()))
