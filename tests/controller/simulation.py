"""A whole job in one deterministic process: replicas, trainer, store and controller as random events.

Every event is one thing that can happen in a real run: a lease request (sometimes repeated), a push (sometimes
duplicated, late, or with a failed reward), a heartbeat that forgets leases, a crash, an expiry, a weight update
in the middle of a group, an assembly, a commit, a lost trainer, a checkpoint, a rewind, a restart of the
controller from what it had written. After each, `check` asserts the invariants of the ledger.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from controller.admission import schedulable
from controller.assembly import Assembled
from controller.groups import Group, State
from controller.ledger import Ledger, LedgerParams
from schema.wire.sample import SampleHeader
from tests.support.ledger import StoredLedger


@dataclass
class Replica:
    name: str
    version: int
    leases: dict[str, str] = field(default_factory=dict)  # group id -> lease id
    last_request: str = ""


class Simulation:
    """Drives a ledger by a seeded random schedule. `run` returns when the job has finished."""

    def __init__(self, seed: int, params: LedgerParams, n_replicas: int) -> None:
        self.random = random.Random(seed)
        self.params = params
        self.ledger = Ledger(params, self._lease_id)
        self.replicas = [Replica(f"r{i}", 0) for i in range(n_replicas)]
        self.published = 0
        self.checkpoints = [0]
        self.now = 0.0
        self.trained: dict[str, int] = {}  # group id -> step, of the present timeline
        self.stored = StoredLedger()
        self.events = 0

    def _lease_id(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    # ---- events -------------------------------------------------------------------------------------------

    def lease(self) -> None:
        replica = self.random.choice(self.replicas)
        repeat = replica.last_request and self.random.random() < 0.1
        request = replica.last_request if repeat else self._lease_id()
        replica.last_request = request
        decision = self.ledger.lease(
            replica.name,
            request,
            replica.version,
            self.published,
            self.random.randint(1, 4),
            self.now,
            probe=self.random.random() < 0.2,
        )
        for group in decision.groups:
            assert group.lease_id is not None
            replica.leases[group.id] = group.lease_id
        if decision.refusal is not None and decision.refusal.update:
            assert replica.version < self.published, "an update was asked for, but there is none"

    def push(self) -> None:
        replica = self.random.choice(self.replicas)
        if not replica.leases:
            return
        name, lease_id = self.random.choice(sorted(replica.leases.items()))
        group = self.ledger.groups.get(name)
        done = set(group.samples) if group is not None and group.lease_id == lease_id else set()
        missing = [i for i in range(self.params.n_samples) if i not in done]
        if not missing:
            del replica.leases[name]
            return
        index = self.random.choice(missing)
        holder = group.lease_id if group is not None and group.state is State.LEASED else None
        header = self._header(index, group, replica)
        outage = self.random.random() < 0.3
        outcome = self.ledger.push(name, lease_id, index, header, 100, self.now, outage=outage)
        if outcome.accepted and not outcome.duplicate:
            assert group is not None
            assert lease_id in (holder, group.completed_lease), "counted under a lease that has ended"
            self.stored.payloads.add((name, f"{lease_id}.{index}"))
        if outcome.accepted and self.random.random() < 0.1:
            assert self.ledger.push(name, lease_id, index, header, 100, self.now).duplicate
        if not outcome.accepted:
            replica.leases.pop(name)

    def _header(self, index: int, group: Group | None, replica: Replica) -> SampleHeader:
        oldest = min(group.lease_version if group is not None else 0, replica.version)
        oldest = self.random.randint(max(oldest, 0), replica.version)
        failed = self.random.random() < 0.01
        return SampleHeader(
            index=index,
            prompt_tokens=1,
            response_tokens=1,
            total_tokens=2,
            oldest_version=oldest,
            newest_version=replica.version,
            finish_reason="overlong" if self.random.random() < 0.02 else "stop",
            rewards={"r": float(self.random.randint(0, 3))},
            score=None if failed else 1.0,
            error="ValueError: simulated" if failed else None,
            outage=failed and self.random.random() < 0.5,
        )

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

    def release(self) -> None:
        replica = self.random.choice(self.replicas)
        for name in list(replica.leases):
            self.ledger.release(replica.leases.pop(name))

    def expire(self) -> None:
        self.now += self.random.uniform(0, self.params.lease_timeout / 3)
        self.ledger.expire(self.now)

    def step(self) -> None:
        result = self.ledger.assemble(self.now)
        if not isinstance(result, Assembled):
            return
        for group in result.groups:
            for part in group.parts():
                assert (group.id, part) in self.stored.payloads, "a batch names a payload that is gone"
        if self.random.random() < 0.1:
            self.ledger.abandon_step()
            return
        if self.random.random() < 0.3:
            return  # still training: other events happen while the step is batched
        for group in result.groups:
            assert group.id not in self.trained, f"{group.id} would be trained twice"
            assert result.step - group.oldest_version() <= self.params.staleness_bound
            self.trained[group.id] = result.step
        self.ledger.commit(result.step)
        assert self.ledger.commit(result.step).duplicate
        if self.ledger.committed % self.params.sync_interval == 0 or self.ledger.finished:
            self.published = self.ledger.committed

    def checkpoint(self) -> None:
        step = self.random.randint(self.ledger.durable, self.ledger.committed)
        self.ledger.checkpoint(step)
        self.checkpoints.append(step)

    def rewind(self) -> None:
        self.ledger.abandon_step()
        self.checkpoints = [c for c in self.checkpoints if c <= self.ledger.committed]
        step = self.random.choice(self.checkpoints[-2:])
        self.ledger.rewind(step)
        self.checkpoints = [c for c in self.checkpoints if c <= step]
        self.trained = {name: s for name, s in self.trained.items() if s < step}
        for name, group in self.ledger.groups.items():
            if name not in self.trained and group.state is not State.DROPPED:
                assert group.newest_version() <= step, "tokens of a timeline that is gone"
        self.published = step
        for replica in self.replicas:
            if replica.version > step:  # it holds weights of the lost timeline: it must load the new ones
                replica.version = step

    def restart(self) -> None:
        """The controller dies and rebuilds itself from what it had written."""
        self.stored.write(self.ledger)
        before = self.ledger.status()
        self.ledger = self.stored.restore(self.params, self._lease_id)
        self.ledger.extend_leases(1.0, self.now + 1.0)
        assert self.ledger.status() == before

    def resume_from_snapshot(self) -> None:
        """Everything dies; the job goes on from a checkpoint with an empty store."""
        self.ledger.abandon_step()
        snapshot = self.ledger.snapshot(self.ledger.committed)
        self.ledger = Ledger.from_snapshot(self.params, snapshot, self._lease_id)
        self.stored = StoredLedger()
        self.checkpoints = [self.ledger.committed]
        self.published = self.ledger.committed
        for replica in self.replicas:
            replica.version = min(replica.version, self.published)
            replica.leases.clear()

    # ---- the run ------------------------------------------------------------------------------------------

    def check(self) -> None:
        ledger = self.ledger
        status = ledger.status()
        assert sum(status.states.values()) == status.created == ledger.frontier
        assert sum(status.dropped.values()) == status.states["dropped"]
        counted = [*ledger.in_state(State.LEASED), *ledger.in_state(State.READY)]
        assert ledger.deadlines == Counter(group.deadline for group in counted)
        if self.params.oversample == 1.0:
            assert schedulable(ledger.deadlines, ledger.first_step, self.params.groups_per_step)
            assert ledger.outstanding <= (self.params.staleness_bound + 1) * self.params.groups_per_step
        assert status.max_staleness <= self.params.staleness_bound
        assert status.over_bound == 0
        assert all(ledger.groups[name].state in (State.TRAINED, State.DURABLE) for name in self.trained
                   if name in ledger.groups)  # fmt: skip

    def run(self, chaos: float, max_events: int = 20_000) -> None:
        """Random events until the job is finished; `chaos` scales how often something breaks."""
        usual = [(self.lease, 6.0), (self.push, 30.0), (self.beat, 2.0), (self.update, 3.0), (self.step, 6.0)]
        broken = [
            (self.crash, 1.0), (self.release, 0.5), (self.expire, 0.5), (self.checkpoint, 0.5),
            (self.rewind, 0.1), (self.restart, 0.5), (self.resume_from_snapshot, 0.05),
        ]  # fmt: skip
        while not self.ledger.finished:
            self.events += 1
            assert self.events <= max_events, "the job does not come to its end"
            calm = self.events > max_events // 2  # liveness: once nothing breaks any more, the job must end
            weights = [w for _, w in usual] + [0.0 if calm else w * chaos for _, w in broken]
            (event,) = self.random.choices([e for e, _ in usual + broken], weights)
            event()
            self.stored.write(self.ledger)
            self.check()
        status = self.ledger.status()
        done = status.states["trained"] + status.states["durable"] + status.states["dropped"]
        if self.params.max_steps is None:
            assert done == self.params.total_positions, "a position was neither trained nor dropped"
