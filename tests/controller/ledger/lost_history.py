"""A job whose store may lose any suffix of its history at any moment, while trainers and replicas live on.

Ledger, publications and policy epoch are what the store keeps; after each event the state goes onto a pile, and
`lose` takes an older one from it. The truth is with the others: which groups each trainer's weights contain, step by
step, and which weights made each sample. Against that truth everything is judged, never against the ledger's claims.

Trainers use the real `RejoinLog`; decisions are those of `controller.ledger.reconcile`; what the service does around
them (`controller.services`: `recovery`, `replicas`, `trainers.steps`) is repeated here in few lines.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from dataclasses import dataclass, field

from controller.ledger.assembly import Assembled, build_table
from controller.ledger.group import GroupState
from controller.ledger.group_table import GroupTable
from controller.ledger.reconcile import Claim, FromSnapshot, Known, NeedSnapshot, Refuse, decide
from controller.ledger.rejoin import adopt, recommit
from controller.ledger.values import LedgerParams
from controller.state.publications import Publications
from policy_worker.rejoin_log import RejoinLog
from schema.wire.batch import StepTable, batch_digest
from schema.wire.messages import (
    CommitReply,
    HeldLease,
    LedgerSnapshot,
    PublishReply,
    PublishRequest,
    RegisterReply,
    RegisterRequest,
)
from schema.wire.sample import SampleHeader
from schema.wire.weights import Publication
from tests.support.ledger import StoredLedger, schedulable, score_of

KEPT_STATES = 400


@dataclass
class Trainer:
    """One process: what its weights contain, and what it remembers."""

    uid: int
    epoch: int
    trained: list[frozenset[str]]
    weights: set[str]
    """Hashes of all published versions that its weights descend from."""
    content: str = "initial/0"
    """Identifies its weights: who trained them, and how many steps they contain."""
    history: RejoinLog = field(default_factory=RejoinLog)
    timeline: int = 0
    batch: StepTable | None = None
    applied: bool = False
    """The batch is in the weights, its commit is on its way."""

    @property
    def steps(self) -> int:
        return len(self.trained)


@dataclass
class Checkpoint:
    step: int
    content: str
    snapshot: LedgerSnapshot
    trained: list[frozenset[str]]
    weights: set[str]


@dataclass
class Rollout:
    name: str
    loaded: Publication | None = None
    used: dict[str, set[str]] = field(default_factory=dict)
    """Weights that were loaded while a lease was held: any of them may have made its tokens."""
    held: dict[str, HeldLease] = field(default_factory=dict)


class World:
    """Drives everything by a seeded random schedule. `run` returns when the job has finished."""

    def __init__(self, seed: int, params: LedgerParams, n_rollouts: int, *, forgetful: bool = False) -> None:
        self.random = random.Random(seed)
        self.params, self.forgetful = params, forgetful
        self.stored = StoredLedger()
        self.ledger = self.stored.with_orders(GroupTable(params), self._lease_id)
        self.rows: dict[str, tuple[int, int, int]] = {}
        self.publications = Publications(keep=3)
        self.epoch = 0
        self.past: deque[tuple[StoredLedger, list[dict[str, object]], int, int]] = deque(maxlen=KEPT_STATES)
        self.tick = 0
        self.rollouts = [Rollout(f"r{i}") for i in range(n_rollouts)]
        self.checkpoints: list[Checkpoint] = []
        self.replaced: list[Trainer] = []
        self.made_by: dict[tuple[str, str, int], set[str]] = {}
        self.ids: dict[int, str] = {}
        self.meanings: dict[tuple[str, object], object] = {}
        """Of each policy epoch and lease that was ever given out."""
        self.highest_id = 0
        self.seen: Counter[str] = Counter()
        self.trainer = self._start_trainer()
        self.publish()
        self.write()

    def _lease_id(self) -> str:
        return f"{self.random.getrandbits(64):016x}"

    def _now(self) -> int:
        self.tick += 1
        return self.tick

    # ---- trainers come ------------------------------------------------------------------------------------

    def _start_trainer(self) -> Trainer:
        """A new process: from the newest checkpoint, else from the start."""
        found = self.checkpoints[-1] if self.checkpoints else None
        step, snapshot = (found.step, found.snapshot) if found else (0, None)
        ledger = self.ledger
        self.epoch = max(self.epoch + 1, self._now())
        assert self.meanings.setdefault(("policy epoch", self.epoch), self.tick) == self.tick
        ledger.table.abandon_step()
        timeline = None if snapshot is None else snapshot.timeline
        if not ledger.table.lineage.contains(step, timeline, ledger.table.committed):
            assert snapshot is not None
            before = ledger.table.timeline
            ledger.begin_from(snapshot)
            if ledger.table.timeline != before:
                self.publications.rewind(-1)
        elif step < ledger.table.committed:
            ledger.rewind(step)
            self.publications.rewind(step)
        trained, weights = (found.trained[:], set(found.weights)) if found else ([], {"initial/0"})
        trainer = Trainer(self._now(), self.epoch, trained, weights, timeline=ledger.table.timeline)
        trainer.content = found.content if found else trainer.content
        request = RegisterRequest(request_id=f"register-{trainer.uid}", role="policy", name="p", resume_step=step)
        trainer.history.registered(request, self._register_reply())
        trainer.history.snapshot = lambda: self._newest_snapshot(trainer)
        return trainer

    def _newest_snapshot(self, trainer: Trainer) -> LedgerSnapshot | None:
        return self.checkpoints[-1].snapshot if self.checkpoints else None

    def _register_reply(self) -> RegisterReply:
        return RegisterReply.model_construct(
            timeline=self.ledger.table.timeline, timeline_began=self.ledger.table.began,
            timeline_since=self.ledger.table.lineage.since, committed_steps=self.ledger.table.committed,
            policy_epoch=self.epoch, publication=None,
        )  # fmt: skip

    def crash_trainer(self) -> None:
        """The process dies, or is only cut off and comes back later, to be refused. So may the next ones."""
        for _ in range(self.random.choice([1, 1, 3])):
            self.seen["crash"] += 1
            self.replaced = [*self.replaced, self.trainer][-2:]
            self.trainer = self._start_trainer()
            self.publish()

    # ---- the trainer's calls ------------------------------------------------------------------------------

    def mend(self, trainer: Trainer) -> bool:
        """Declare and replay, as `policy_worker.session` does; False: this trainer was replaced."""
        history, claim = trainer.history, trainer.history.claim()
        snapshot: LedgerSnapshot | None = None
        while True:
            known = Known(self.epoch, self.ledger.table.timeline, self.ledger.table.committed)
            decision = decide(known, _claim(trainer, claim, snapshot))
            if isinstance(decision, Refuse):
                return False
            self.epoch = trainer.epoch
            if not isinstance(decision, NeedSnapshot):
                break
            snapshot = history.snapshot()
            if snapshot is None:  # the process ends, as the real one does
                return False
        if isinstance(decision, FromSnapshot):
            assert snapshot is not None
            before = self.ledger.table.timeline
            self.ledger.begin_from(snapshot, claim["timeline"], claim["began"])
            if self.ledger.table.timeline != before:
                self.publications.rewind(-1)
            self.seen["from snapshot"] += 1
        elif decision.back_to is not None:
            self.ledger.rewind(decision.back_to, claim["timeline"])
            self.publications.rewind(decision.back_to)
            self.seen["forgotten rewind"] += 1
        self.publications.heard(claim["newest_publication"])
        self.publications.declare(claim["publications"], claim["timeline"])
        for trained in history.since(decision.step):
            assert trained.table is not None
            recommit(self.ledger.table, trained.table)
            self.seen["replayed"] += 1
            self.check_ledger()
        assert self.ledger.table.committed == trainer.steps
        self.check_history(trainer)
        return True

    def _must_mend(self, trainer: Trainer) -> None:
        if not self.mend(trainer):
            assert trainer is self.trainer
            self.crash_trainer()  # it ends with an error and is started again

    def fetch(self) -> None:
        """Ask for the batch of the next step."""
        trainer = self.trainer
        if trainer.batch is not None or self.ledger.table.finished:
            return
        if self.epoch != trainer.epoch or self.ledger.table.committed != trainer.steps:
            return self._must_mend(trainer)
        result = self.ledger.assemble(0.0)
        if isinstance(result, Assembled):
            trainer.batch = build_table(result.step, self.ledger.table.timeline, trainer.epoch, result.groups)
            trainer.history.took(trainer.batch)
            self.check_batch(trainer, result)

    def train(self) -> None:
        """The optimizer step: from now on the weights contain the batch."""
        trainer = self.trainer
        if trainer.batch is not None and not trainer.applied:
            trainer.history.applied(trainer.batch.step, {}, 0.0)
            trainer.trained.append(frozenset(trainer.batch.group_ids))
            trainer.applied = True
            trainer.content = f"{trainer.uid}/{trainer.steps}"
            trainer.weights.add(trainer.content)

    def commit(self) -> None:
        trainer = self.trainer
        if not trainer.applied:
            return
        table = trainer.batch
        assert table is not None
        if not self._knows(table, trainer) and not self.mend(trainer):
            return self.crash_trainer()
        if self.ledger.table.committed == table.step:
            self.ledger.commit(table.step)
        assert not self.ledger.commit(table.step)
        durable = 0 if self.forgetful else self.ledger.table.committed
        committed = self.ledger.table.committed
        reply = CommitReply(
            committed_steps=committed, total_steps=1, publish=True, finished=False, durable_steps=durable
        )
        trainer.history.committed(reply)
        trainer.batch, trainer.applied = None, False
        self.publish()

    def _knows(self, table: StepTable, trainer: Trainer) -> bool:
        ledger = self.ledger
        if self.epoch != trainer.epoch or ledger.table.committed > table.step:
            return self.epoch == trainer.epoch
        names = [group.id for group in ledger.batch(table.step) or []]
        return bool(names) and batch_digest(ledger.table.timeline, table.step, names) == table.digest

    def publish(self) -> None:
        trainer = self.trainer
        if self.epoch != trainer.epoch or self.ledger.table.committed < trainer.steps:
            return  # told at the next call
        digest = trainer.content
        request = PublishRequest(
            request_id=f"publish-{trainer.uid}-{digest}", replica_id="p.1", incarnation=1,
            policy_epoch=trainer.epoch, version=trainer.steps, uri=digest, manifest_hash=digest,
            content_hash=digest, n_bytes=1,
            newest_publication=max(trainer.history.newest_publication, self.highest_id),
        )  # fmt: skip
        publication = self.publications.publish(request, self.ledger.table.timeline, self.ledger.table.committed)
        self._met(publication)
        loaded = {r.loaded.id for r in self.rollouts if r.loaded is not None}
        collectable = self.publications.collect(loaded)
        trainer.history.published(PublishReply(publication=publication, collectable=collectable))

    def _met(self, publication: Publication) -> None:
        """Somebody was handed this publication: its id means this content for ever."""
        assert self.ids.setdefault(publication.id, publication.manifest_hash) == publication.manifest_hash
        self.highest_id = max(self.highest_id, publication.id)

    def checkpoint(self) -> None:
        trainer = self.trainer
        if trainer.batch is not None or self.epoch != trainer.epoch or self.ledger.table.committed != trainer.steps:
            return
        snapshot = self.ledger.snapshot(trainer.steps)
        self.checkpoints.append(
            Checkpoint(trainer.steps, trainer.content, snapshot, trainer.trained[:], set(trainer.weights))
        )
        if self.random.random() < 0.8:  # else the controller was never told
            self.ledger.checkpoint(trainer.steps)

    def zombie(self) -> None:
        """A trainer that was replaced is heard again: it may not be listened to."""
        if not self.replaced:
            return
        old = self.random.choice(self.replaced)
        if old.epoch < self.epoch:
            before = self.ledger.table.header()
            assert not self.mend(old)
            assert self.ledger.table.header() == before
            self.seen["zombie"] += 1

    def heartbeat(self) -> None:
        """The trainer's: shows that the controller knows less than it did."""
        acknowledged, newest = self.trainer.history.known
        fewer = self.ledger.table.committed < acknowledged or self.publications.newest_id < newest
        if fewer or self.epoch != self.trainer.epoch:
            self._must_mend(self.trainer)

    # ---- rollout replicas ---------------------------------------------------------------------------------

    def lease(self) -> None:
        rollout = self.random.choice(self.rollouts)
        loaded, newest = rollout.loaded, self.publications.newest
        if loaded is None or newest is None:
            return self._load(rollout)
        held = self.publications.valid(loaded.id, loaded.manifest_hash)
        if held is None:
            if not self.publications.knows(loaded.id):
                self.publications.heard(loaded.id)
            return self._load(rollout)
        decision = self.ledger.lease(
            rollout.name, self._lease_id(), loaded.version, newest.version, self.random.randint(1, 4), 0.0
        )
        for group in decision.groups:
            assert group.lease_id is not None
            rollout.held[group.lease_id] = HeldLease(
                group_id=group.id, lease_id=group.lease_id, version=loaded.version, publication_id=loaded.id,
                manifest_hash=loaded.manifest_hash, pushed=sorted(group.samples),
            )  # fmt: skip
            rollout.used[group.lease_id] = {loaded.manifest_hash}
            assert self.meanings.setdefault(("lease", group.lease_id), group.id) == group.id

    def _load(self, rollout: Rollout) -> None:
        newest = self.publications.newest
        if newest is not None:
            self._met(newest)
            rollout.loaded = newest
            for used in rollout.used.values():
                used.add(newest.manifest_hash)

    def update(self) -> None:
        self._load(self.random.choice(self.rollouts))

    def push(self) -> None:
        rollout = self.random.choice(self.rollouts)
        newest = self.publications.newest
        if not rollout.held or rollout.loaded is None or newest is None:
            return
        lease = self.random.choice(list(rollout.held.values()))
        missing = sorted(set(range(self.params.group_size)) - set(lease.pushed))
        if not missing:
            return self._drop(rollout, lease.lease_id)
        index = self.random.choice(missing)
        version = max(lease.version, rollout.loaded.version)
        if version > newest.version:  # the service refuses tokens of versions that are not published
            return
        oldest = self.random.randint(lease.version, version)
        failed = self.random.random() < 0.02
        header = SampleHeader(
            index=index, prompt_tokens=1, response_tokens=1, total_tokens=2, oldest_version=oldest,
            newest_version=version, finish_reason="stop", rewards={"r": float(self.random.randint(0, 3))},
            score=None if failed else score_of(lease.group_id, index), error="simulated" if failed else None,
            baseline=index == self.params.baseline,
        )  # fmt: skip
        outcome = self.ledger.push(lease.group_id, lease.lease_id, index, header, 100)
        if not outcome.accepted:
            return self._drop(rollout, lease.lease_id)
        if not outcome.duplicate:
            makers = {used for used in rollout.used[lease.lease_id] if oldest <= _version(used) <= version}
            self.made_by[lease.group_id, lease.lease_id, index] = makers
        pushed = sorted({*lease.pushed, index})
        if len(pushed) == self.params.group_size:
            self._drop(rollout, lease.lease_id)
        else:
            rollout.held[lease.lease_id] = lease.model_copy(update={"pushed": pushed})

    def _drop(self, rollout: Rollout, lease_id: str) -> None:
        rollout.held.pop(lease_id, None)
        rollout.used.pop(lease_id, None)

    def beat(self) -> None:
        """A heartbeat; what is called lost is declared, and may be taken back."""
        rollout = self.random.choice(self.rollouts)
        lost = self.ledger.renew(rollout.name, list(rollout.held), 0.0)
        timeline, told = self.ledger.table.timeline, []
        for lease_id in lost:
            lease = rollout.held[lease_id]
            weights = self.publications.valid(lease.publication_id, lease.manifest_hash)
            of_now = weights is not None and (weights.timeline, weights.version) == (timeline, lease.version)
            told.append(lease if of_now else lease.model_copy(update={"version": -1}))
        gone = adopt(self.ledger.table, rollout.name, told, 0.0)
        self.seen["adopted"] += len(told) - len(gone)
        for lease_id in gone:
            self._drop(rollout, lease_id)

    def crash_rollout(self) -> None:
        rollout = self.random.choice(self.rollouts)
        self.ledger.replica_gone(rollout.name, failed=False)
        rollout.held.clear()
        rollout.used.clear()
        rollout.loaded = None

    # ---- the store ----------------------------------------------------------------------------------------

    def write(self) -> None:
        self.stored.write(self.ledger)
        records = [entry.to_record() for entry in self.publications._entries.values()]
        state = copy.copy(self.stored)
        for name in ("groups", "samples", "archive"):
            setattr(state, name, dict(getattr(state, name)))
        self.past.append((state, records, self.publications.highest_id, self.epoch))

    def lose(self) -> None:
        """Redis comes back with any prefix of history, and the controller starts again on it."""
        back = min(len(self.past), int(self.random.expovariate(1 / 30)) + 1)
        for _ in range(back - 1):
            self.past.pop()
        state, records, highest, self.epoch = self.past[-1]
        self.stored = copy.copy(state)
        for name in ("groups", "samples", "archive"):
            setattr(self.stored, name, dict(getattr(state, name)))
        self.ledger = self.stored.restore(self.params, self._lease_id)
        self.publications = Publications(3, records, highest)
        self.seen["lost"] += 1

    def lose_all(self) -> None:
        """Redis comes back empty."""
        files, self.stored = self.stored.orders, StoredLedger()
        self.stored.orders = files
        self.ledger = self.stored.with_orders(GroupTable(self.params), self._lease_id)
        self.publications, self.epoch = Publications(keep=3), 0
        self.past.clear()
        self.seen["lost all"] += 1

    # ---- judging ------------------------------------------------------------------------------------------

    def check_batch(self, trainer: Trainer, assembled: Assembled) -> None:
        """By the truth: nothing twice, nothing too old, nothing made by weights that are no ancestors."""
        before = set().union(*trainer.trained) if trainer.trained else set()
        for group in assembled.groups:
            assert group.id not in before, f"{group.id} would be trained twice"
            row = self.ledger.table.row_of(group)
            assert self.rows.setdefault(group.id, row) == row, "a group is made of another row"
            for index, meta in group.samples.items():
                makers = self.made_by[group.id, meta.lease_id, index]
                assert makers <= trainer.weights, "tokens of weights that are no part of this history"
                oldest = min([meta.header.oldest_version, *map(_version, makers)])
                assert 0 <= assembled.step - oldest <= self.params.staleness_bound

    def check_history(self, trainer: Trainer) -> None:
        """The ledger's committed steps are the trainer's, group by group."""
        for step, names in enumerate(trainer.trained[: self.ledger.table.committed]):
            for name in names:
                group = self.ledger.table.find(name)
                if group is not None:  # else it was trained before the snapshot that the ledger began from
                    assert (group.state in (GroupState.TRAINED, GroupState.DURABLE), group.step) == (True, step), name

    def check_ledger(self) -> None:
        ledger = self.ledger
        status = ledger.table.status()
        assert sum(status.states.values()) == status.created == ledger.table.frontier
        assert sum(status.dropped.values()) == status.states["dropped"]
        assert schedulable(ledger.table.deadlines, ledger.table.first_step, self.params.groups_per_step)
        assert (status.over_bound, status.max_staleness <= self.params.staleness_bound) == (0, True)

    def run(self, chaos: float, max_events: int = 12_000) -> None:
        """Random events until the job is finished; in the second half of `max_events` nothing breaks any more."""
        usual = [
            (self.lease, 6.0), (self.push, 30.0), (self.beat, 2.0), (self.update, 2.0), (self.fetch, 4.0),
            (self.train, 4.0), (self.commit, 4.0), (self.heartbeat, 1.0), (self.checkpoint, 0.3), (self.zombie, 0.2),
        ]  # fmt: skip
        broken = [
            (self.lose, 1.0), (self.lose_all, 0.05), (self.crash_trainer, 0.1), (self.crash_rollout, 0.5),
        ]  # fmt: skip
        events = 0
        while not (self.ledger.table.finished and self._agreed()):
            events += 1
            assert events <= max_events, "the job does not come to its end"
            weights = [w for _, w in usual] + [0.0 if events > max_events // 2 else w * chaos for _, w in broken]
            (event,) = self.random.choices([e for e, _ in usual + broken], weights)
            event()
            self.check_ledger()
            self.write()
        self.check_end()

    def _agreed(self) -> bool:
        trainer = self.trainer
        return self.epoch == trainer.epoch and self.ledger.table.committed == trainer.steps and not trainer.applied

    def check_end(self) -> None:
        """Every position was trained exactly once, as its trainer saw it, or dropped with a reason."""
        trained = [name for names in self.trainer.trained for name in names]
        assert len(set(trained)) == len(trained)
        self.check_history(self.trainer)
        self.ledger.close()
        status = self.ledger.table.status()
        assert status.states["trained"] + status.states["durable"] == len(trained)
        if self.params.max_steps is None:
            # What was handed out again after a loss may be of another source: a few more than the job has.
            least = self.params.mixture().limit
            assert len(trained) + status.states["dropped"] == self.ledger.table.frontier
            assert self.ledger.table.frontier == least if len(self.ledger.table.mixture) == 1 else least <= 2**20


def _version(content: str) -> int:
    return int(content.partition("/")[2])


def _claim(trainer: Trainer, claim: dict[str, int], snapshot: LedgerSnapshot | None) -> Claim:
    fields = {name: claim[name] for name in ("timeline", "began", "since", "first", "steps")}
    return Claim(
        policy_epoch=trainer.epoch,
        **fields,
        snapshot_step=None if snapshot is None else snapshot.committed_steps,
        snapshot_timeline=0 if snapshot is None else snapshot.timeline,
    )
