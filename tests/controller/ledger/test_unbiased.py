"""Long samples are not lost to replicas that die: what is trained has the same lengths with and without deaths.

The real ledger, driven by a clock of ticks. A sample's length follows from its position alone, as a real one follows
from its seed; a tenth are much longer than the replicas usually live. Every death kills what is under way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from controller.ledger.assembly import Assembled
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.values import LedgerParams
from schema.wire.sample import SampleHeader
from tests.support.effort import examples

SHORT, LONG = 4, 60
PARAMS = LedgerParams(
    groups_per_step=4, n_samples=2, staleness_bound=2, n_positions=80, lease_timeout=5.0, max_attempts=3
)


def length(position: int, index: int) -> int:
    """Ticks (tokens) of a sample: a heavy tail."""
    draw = random.Random(position * 31 + index)
    return LONG + draw.randrange(SHORT) if draw.random() < 0.1 else 1 + draw.randrange(SHORT)


@dataclass
class Replica:
    name: str
    version: int = 0
    left: dict[tuple[str, int], int] = field(default_factory=dict)
    """Ticks that each sample under way still needs."""
    leases: dict[str, str] = field(default_factory=dict)
    silent: bool = False

    def die(self) -> None:
        self.left.clear()
        self.leases.clear()


@dataclass
class Cluster:
    """Replicas that die after an exponential time, and a trainer that takes one tick per step.

    how: killed (the launcher sees it), silent (its leases expire), drained (it gives back what it holds), crashed.
    """

    params: LedgerParams
    how: str = "killed"
    lifetime: float = float("inf")
    seed: int = 0
    deaths: int = 0
    trained: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ledger = Ledger(GroupTable(self.params))
        self.replicas = [Replica(f"r{i}") for i in range(3)]
        self.now, self.requests = 0.0, 0

    def run(self) -> Counter[tuple[int, int, int]]:
        """Until the job is over; (position, index, length) of every trained sample."""
        while not self.ledger.table.finished:
            self.now += 1.0
            assert self.now < 50_000, "the job does not come to its end"
            for replica in self.replicas:
                if self.random.random() < 1.0 / self.lifetime:
                    self._end(replica)
                self._work(replica)
            self.ledger.expire(self.now)
            self._train()
        return self.trained

    def _end(self, replica: Replica) -> None:
        self.deaths += bool(replica.left)
        if self.how == "silent":
            replica.name += "'"  # its node is gone, another one comes: nobody speaks for the old leases
        else:
            self.ledger.replica_gone(replica.name, failed=self.how == "crashed")
        replica.die()
        replica.version = self.ledger.table.committed

    def _work(self, replica: Replica) -> None:
        self.requests += 1
        if len(replica.leases) < 3:
            version = replica.version = self.ledger.table.committed
            granted = self.ledger.lease(
                replica.name, f"request-{self.requests}", version, version, 3 - len(replica.leases), self.now
            )
            for group in granted.groups:
                assert group.lease_id is not None
                replica.leases[group.id] = group.lease_id
                for index in set(range(self.params.n_samples)) - set(group.samples):
                    replica.left[group.id, index] = length(group.position, index)
        for (name, index), ticks in list(replica.left.items()):
            replica.left[name, index] = ticks - 1
            if ticks == 1:
                self._push(replica, name, index)
        lost = self.ledger.renew(replica.name, list(replica.leases.values()), self.now)
        for name in [name for name, lease in replica.leases.items() if lease in lost]:
            self._forget(replica, name)

    def _push(self, replica: Replica, name: str, index: int) -> None:
        del replica.left[name, index]
        tokens = length(self.ledger.table.groups[name].position, index)
        version = self.ledger.table.groups[name].lease_version
        header = SampleHeader(
            index=index, prompt_tokens=1, response_tokens=tokens, total_tokens=tokens + 1, oldest_version=version,
            newest_version=replica.version, finish_reason="stop", rewards={}, score=1.0,
        )  # fmt: skip
        assert self.ledger.push(name, replica.leases[name], index, header, 10).accepted
        if not any(group == name for group, _ in replica.left):
            self._forget(replica, name)

    @staticmethod
    def _forget(replica: Replica, name: str) -> None:
        replica.leases.pop(name)
        for key in [key for key in replica.left if key[0] == name]:
            del replica.left[key]

    def _train(self) -> None:
        assembled = self.ledger.assemble(self.now)
        if not isinstance(assembled, Assembled):
            return
        for group in assembled.groups:
            for index, meta in group.samples.items():
                self.trained[group.position, index, meta.header.response_tokens] += 1
        self.ledger.commit(assembled.step)


EVERYTHING = Counter(
    (position, index, length(position, index))
    for position in range(PARAMS.n_positions)
    for index in range(PARAMS.n_samples)
)


def test_without_deaths_everything_is_trained_once() -> None:
    assert Cluster(PARAMS).run() == EVERYTHING


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(examples(1)))
@pytest.mark.parametrize("how", ["killed", "silent", "drained"])
def test_replicas_that_live_shorter_than_the_longest_samples(how: str, seed: int) -> None:
    """Each long group is begun again and again, far beyond `max_attempts`, and is trained in the end."""
    cluster = Cluster(PARAMS, how, lifetime=LONG / 2, seed=seed)
    assert cluster.run() == EVERYTHING
    assert cluster.ledger.table.status().dropped == {}
    attempts = {group.position: group.attempt for group in cluster.ledger.table.groups.values()}
    assert max(attempts.values()) > PARAMS.max_attempts
    assert cluster.deaths > 10


def test_crashes_that_are_nobodys_fault() -> None:
    """Long groups are there at more crashes than short ones: each alone in the end, so none is blamed."""
    cluster = Cluster(PARAMS, "crashed")
    crashes = 0
    while not cluster.ledger.table.finished:
        cluster.now += 1.0
        busy = [replica for replica in cluster.replicas if len(replica.leases) > 1]
        if busy and cluster.now % 15 == 0:
            cluster._end(busy[0])
            crashes += 1
        for replica in cluster.replicas:
            cluster._work(replica)
        cluster._train()
    assert crashes >= 6
    assert max(group.crashes for group in cluster.ledger.table.groups.values()) >= PARAMS.max_attempts - 1
    assert cluster.trained == EVERYTHING
    assert cluster.ledger.table.status().dropped == {}


@pytest.mark.parametrize("how", ["killed", "silent", "drained"])
def test_a_job_that_ends_before_its_data_trains_nearly_the_same_groups(how: str) -> None:
    """What differs is what was under way at the end, and that is bounded by admission."""
    params = replace(PARAMS, max_steps=12)
    calm, stormy = Cluster(params), Cluster(params, how, lifetime=LONG / 2, seed=1)
    first, second = set(calm.run()), set(stormy.run())
    assert len(first) == len(second) == 12 * 8
    differing = {position for position, _, _ in first ^ second}
    assert len(differing) <= 2 * (params.staleness_bound + 1) * params.groups_per_step
