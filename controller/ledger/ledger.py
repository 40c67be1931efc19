"""The ledger: every group of the job, the state it is in, and the only operations that move it.

     waiting ─lease─▶ leased ─all samples─▶ ready ─assemble─▶ batched ─commit─▶ trained ─checkpoint─▶ durable
        ▲  ▲            │ expired, released,  ▲ │                │  abandoned      │                   │
        │  └────────────┘ replica gone        └─┼────────────────┘                 │                   │
        └───────────────────────────────────────┴──────── rewind to a checkpoint ──┴───────────────────┘
     any state before trained ─▶ dropped(reason)

Invariants, asserted by the simulation in the tests after every event:

    1. A group is one position of one pass over the data, in exactly one state; states add up to the groups created.
    2. A position is created when it is first leased, in the order of the stream; below the frontier each is in
       the ledger, above it none. So every position is trained exactly once or dropped with a reason.
    3. Leased and ready groups are schedulable (see `controller.ledger.admission`): nothing is trained beyond the
       bound.
    4. Only the holder of the current lease id adds samples; what was added once is never counted again.

No bias against long samples: a lease that ends by pre-emption (drain, kill, silence, expiry, a successor under the
holder's name) costs a group nothing but time, however often it happens; what was pushed is kept and the rest is made
again with the same seeds. A crash of the holder's own counts for all that it held, since the cause is unknown;
a group whose next crash would be its last attempt is leased alone, and only a group that was alone is ever
dropped as `poison`.

The ledger has a table (`controller.ledger.group_table`: groups by state and the only ways to change one) and decides
here what replicas do to it: lease, push, train. Functions over the same table are `controller.ledger.checkpoint`
(checkpoints and the way back) and `controller.ledger.rejoin` (what others remember after the store has lost history).

The ledger is synchronous and knows no clock, no network and no store: time comes in as `now` (seconds), and
`GroupTable.take_changes` hands out what must be written before anybody is answered. User mistakes and late messages
are answers or `ApiError`, never exceptions of another kind.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from controller.errors import ApiError
from controller.ledger import checkpoint
from controller.ledger.admission import Admission, Lag
from controller.ledger.assembly import Assembled, WaitingStep, choose, order
from controller.ledger.group import DropReason, Group, GroupState, SampleMeta
from controller.ledger.group_table import GroupTable, staleness_of
from controller.ledger.reward_health import Failure, failure_of
from controller.ledger.values import LeaseDecision, LeaseRefusal, LedgerParams, PushOutcome
from schema.wire.messages import ErrorCode, LedgerSnapshot
from schema.wire.mixture import Source
from schema.wire.sample import SampleHeader

MISSED_BEATS = 2
"""Heartbeats in a row that may fail to list a lease: one can cross the answer that granted it, two cannot."""


BARREN_STEPS = 10
"""Steps' worth of groups, in addition to two passes, without one to train: then a source has none."""
ACCEPTED = PushOutcome(True)


class Ledger:
    """See the module's docstring. All methods are synchronous and never block."""

    def __init__(self, table: GroupTable, new_lease_id: Callable[[], str] | None = None) -> None:
        self.table = table
        self._new_lease_id = new_lease_id or (lambda: secrets.token_urlsafe(12))
        self._lag = Lag()
        self.became_ready, self.ready_tokens = 0, 0
        """Groups that became ready in this process, and their generated tokens."""

    @property
    def params(self) -> LedgerParams:
        return self.table.params

    # ---- leasing ------------------------------------------------------------------------------------------

    def lease(
        self,
        replica_id: str,
        request_id: str,
        version: int,
        published_version: int,
        max_groups: int,
        now: float,
        *,
        probe: bool = False,
    ) -> LeaseDecision:
        """Grant up to `max_groups` groups to a replica whose engine holds `version`.

        The same `request_id` from the same replica gets the same groups again, as far as it still holds them, in
        the same order.
        An empty answer carries the refusal of the first group. probe: during an outage of rewards waiting groups take
        turns, so that a bad one does not block the others.
        """
        held = self.table.held_by(replica_id)
        repeated = [group for group in held if group.request_id == request_id]
        if repeated:
            return LeaseDecision(sorted(repeated, key=attrgetter("place")))
        granted: list[Group] = []
        refusal: LeaseRefusal | None = None
        while len(granted) < max_groups and refusal is None:
            refusal = self._no_need() or self._keeps_apart([*held, *granted])
            if refusal is None:
                group, refusal = self._admit_next(version, published_version, probe)
                if group is not None:
                    self._grant(group, replica_id, request_id, version, now)
                    granted.append(group)
        return LeaseDecision(granted, None if granted else refusal)

    @property
    def room(self) -> int:
        """Groups that the bound lets be leased now at the newest weights, at most."""
        table, params = self.table, self.params
        steps = params.deadline(table.committed) + 1 - table.first_step
        return max(0, steps * params.slots - table.deadlines.total())

    def level(self, among: int) -> int:
        """Groups of each of so many replicas, if all that are leased or may be were dealt to them evenly."""
        return -(-(self.table.leased + self.room) // among)

    def _no_need(self) -> LeaseRefusal | None:
        table = self.table
        if table.closed is not None or table.finished:
            return LeaseRefusal("the job needs no further groups")
        if table.exhausted:
            return LeaseRefusal("every prompt has been handed out")
        if table.awaits_rows:
            return LeaseRefusal("every prompt that is prepared has been handed out: the preparation goes on")
        missing = (table.total_steps - table.committed) * self.params.groups_per_step
        if table.outstanding >= missing * self.params.oversample:
            return LeaseRefusal(f"the {table.outstanding} outstanding groups fill all steps that are left")
        return None

    def _keeps_apart(self, held: Sequence[Group]) -> LeaseRefusal | None:
        """Why a replica that holds these groups gets no other now: a suspect is leased alone."""
        if not self.table.suspects or not held:
            return None
        for group in held:
            if group.id in self.table.suspects:
                return LeaseRefusal(f"group {group.id} is made alone: {group.crashes} replicas crashed with it")
        first = self.table.first_waiting()
        if first is None or first.id not in self.table.suspects:
            return None
        return LeaseRefusal(f"group {first.id} waits for an idle replica: {first.crashes} replicas crashed with it")

    def _admit_next(
        self, version: int, published_version: int, probe: bool
    ) -> tuple[Group | None, LeaseRefusal | None]:
        """The next waiting or new group if a lease at `version` is admissible."""
        table = self.table
        admission = Admission(
            params=self.params,
            committed=table.committed,
            first_step=table.first_step,
            deadlines=table.deadlines,
            lag=self._lag.typical(),
            published_version=published_version,
        )
        refusal = admission.decide(version)
        if refusal is not None:
            return None, refusal
        group = self._least_tried() if probe else table.first_waiting()
        if group is None:
            return table.create(), None
        kept = min(version, group.oldest_version()) if group.samples else version
        if kept < version and admission.decide(kept) is not None:
            table.discard_samples(group)  # too old to be finished in time: begin again
        return group, None

    def _least_tried(self) -> Group | None:
        """The waiting group with the fewest attempts; suspects last, since they are leased alone.

        None where none waits, or all were tried so often that a new one is due: those that wait may all be bad.
        """
        group = min(
            self.table.in_state(GroupState.WAITING),
            key=lambda group: (group.id in self.table.suspects, group.attempt, group.place),
            default=None,
        )
        tried_out = group is not None and group.attempt >= self.params.max_attempts
        return None if tried_out and self.table.unleased else group

    def _grant(self, group: Group, replica_id: str, request_id: str, version: int, now: float) -> None:
        table, params = self.table, self.params
        oldest = group.oldest_version() if group.samples else version
        group.attempt += 1
        group.lease_id = self._new_lease_id()
        table.granted.add(group.lease_id)
        group.replica_id, group.request_id = replica_id, request_id
        group.lease_version, group.lease_step = version, table.committed
        group.expires, group.leased_at = now + params.lease_timeout, now
        table.move(group, GroupState.LEASED, deadline=params.deadline(min(version, oldest)))

    def renew(self, replica_id: str, lease_ids: Iterable[str], now: float) -> list[str]:
        """A heartbeat: extend the listed leases, release those that it forgot, return those it lost."""
        held = {group.lease_id or "": group for group in self.table.held_by(replica_id)}
        listed = set(lease_ids)
        for lease_id, group in held.items():
            if lease_id in listed:
                group.missed = 0
                self._extend(group, now)
            else:
                group.missed += 1
                if group.missed >= MISSED_BEATS:
                    self.table.requeue(group)
        return sorted(listed - held.keys())

    def _extend(self, group: Group, now: float) -> None:
        """Renew a lease. Moved, and so written, only when a quarter of the time-out has passed."""
        expires = now + self.params.lease_timeout
        if expires - group.expires > self.params.lease_timeout / 4:
            group.expires = expires
            self.table.touch(group)

    def holder(self, lease_id: str) -> str | None:
        """Id of the replica that holds a lease, if anybody does."""
        group = self.table.by_lease.get(lease_id)
        return None if group is None else group.replica_id

    def release(self, lease_id: str) -> bool:
        """Give a lease back; its pushed samples are kept for the next holder. False if no replica holds it."""
        group = self.table.by_lease.get(lease_id)
        if group is None:
            return False
        self.table.requeue(group)
        return True

    def replica_gone(self, replica_id: str, *, failed: bool = True) -> int:
        """Release all leases of a replica. `failed`: it crashed by itself; else it was pre-empted or has left."""
        held = self.table.held_by(replica_id)
        for group in held:
            self.table.crashed(group, alone=len(held) == 1) if failed else self.table.requeue(group)
        return len(held)

    def blame(self, names: Sequence[str]) -> None:
        """A replica that held these groups crashed, and was superseded before the crash was reported."""
        for group in [self.table.groups[name] for name in names if name in self.table.groups]:
            if group.state is GroupState.WAITING:
                self.table.crashed(group, alone=len(names) == 1)
            elif group.state is GroupState.LEASED:
                group.crashes += 1
                self.table.suspect(group)
                self.table.touch(group)

    def expire(self, now: float) -> int:
        """Release leases that were not renewed in time."""
        late = [group for group in self.table.in_state(GroupState.LEASED) if group.expires < now]
        for group in late:
            self.table.requeue(group)
        return len(late)

    def extend_leases(self, seconds: float, now: float) -> None:
        """After a downtime of the controller: no lease could be renewed, so none is late.

        A lease has as long as it had, however the clocks of two controllers differ (`seconds` may be negative), but
        not longer than a new one.
        """
        for group in self.table.in_state(GroupState.LEASED):
            group.expires = now + min(max(group.expires + seconds - now, 0.0), self.params.lease_timeout)
            self.table.touch(group)

    # ---- pushing ------------------------------------------------------------------------------------------

    def push(
        self,
        name: str,
        lease_id: str,
        index: int,
        header: SampleHeader,
        n_bytes: int,
        *,
        first: int | None = None,
        offset: int = 0,
        text: str | None = None,
        outage: bool = False,
    ) -> PushOutcome:
        """Add one sample under a lease. When the group is complete it becomes ready, waits again or is dropped.

        However late it comes: whether a lease has ended is decided by `expire` alone.

        Its bytes are those at `offset` of the part that begins with sample `first` (None: it is a part of its own).
        `text` is the header as JSON. outage: rewards are known to be out of reach, so that a time-out or connection
        error is tried again whatever `on_reward_error` says, and costs the group none of its attempts.
        """
        table, size = self.table, self.params.group_size
        group = table.groups.get(name)
        if group is None:
            return self._unknown(name, lease_id)
        if header.index != index or not 0 <= index < size:
            detail = f"sample {index} (header says {header.index}) of a group of {size}"
            return PushOutcome(False, code=ErrorCode.BAD_REQUEST, detail=detail)
        if header.baseline != (index == self.params.baseline):
            detail = f"sample {index} says baseline = {header.baseline}, that is index {self.params.baseline}"
            return PushOutcome(False, code=ErrorCode.BAD_REQUEST, detail=detail)
        known = group.samples.get(index)
        if (known is not None and known.lease_id == lease_id) or lease_id == group.completed_lease:
            table.totals.duplicates += 1
            return PushOutcome(True, duplicate=True)
        if group.state is not GroupState.LEASED or group.lease_id != lease_id:
            detail = f"lease {lease_id} of group {name} has ended; the group is {group.state}"
            return PushOutcome(False, code=ErrorCode.LEASE_LOST, detail=detail)
        if known is not None:  # an earlier holder delivered this very sample (same seed): keep the first
            table.totals.duplicates += 1
            return PushOutcome(True, duplicate=True)
        meta = SampleMeta.of(header, n_bytes, lease_id, first, offset, text)
        if meta.oldest_version(group.lease_version) < group.lease_version:
            detail = f"tokens of version {header.oldest_version} under a lease at version {group.lease_version}"
            return PushOutcome(False, code=ErrorCode.CONFLICT, detail=detail)
        table.add_sample(group, meta)
        if len(group.samples) == size:
            return PushOutcome(True, complete=True, failure=self._complete(group, outage))
        return ACCEPTED

    def _unknown(self, name: str, lease_id: str) -> PushOutcome:
        """The answer to a sample of a group that is not kept whole any more, or never was."""
        group = self.table.find(name)
        if group is None:
            return PushOutcome(False, code=ErrorCode.NOT_FOUND, detail=f"group {name} does not exist")
        detail = f"lease {lease_id} of group {name} has ended; the group is {group.state}"
        return PushOutcome(False, code=ErrorCode.LEASE_LOST, detail=detail)

    def _complete(self, group: Group, outage: bool) -> Failure | None:
        """All samples are there. What failed, if none of them has a score.

        Without the score of its greedy sample a group has no baseline: none of the others can be trained.
        """
        self._lag.observe(self.table.committed - group.lease_step)
        group.completed_lease = group.lease_id
        failed = [index for index, meta in group.samples.items() if meta.failed]
        usable = [meta for meta in group.samples.values() if meta.usable]
        sampled = [meta for meta in usable if not meta.baseline]
        trainable = sampled and len(usable) - len(sampled) == self.params.greedy
        errors = [group.samples[index].header for index in failed]
        made = [meta for meta in group.samples.values() if meta.lease_id == group.lease_id]
        failure = None
        if all(meta.failed for meta in made):
            failure = failure_of([meta.header for meta in made], len(failed) < len(group.samples))
        if failed:
            group.error = errors[0].error or ""
        passing = outage and all(header.outage for header in errors)
        if not failed:
            self._observe(group)
        if failed and (passing or self.params.on_reward_error == "retry"):
            for index in failed:
                self.table.discard_sample(group, index)
            self.table.requeue(group) if passing else self.table.fail(group, DropReason.REWARD_ERROR)
        elif failed and (self.params.on_reward_error == "drop" or not trainable):
            self.table.drop(group, DropReason.REWARD_ERROR)
        elif not trainable:
            self.table.drop(group, DropReason.OVERLONG)
        elif self._without_signal(usable):
            self.table.drop(group, DropReason.ZERO_VARIANCE)
        else:
            self.table.fruitless[group.source] = 0
            self.table.move(group, GroupState.READY, deadline=self.params.deadline(group.oldest_version()))
            self.became_ready += 1
            self.ready_tokens += sum(meta.header.response_tokens for meta in group.samples.values())
        return failure

    def _observe(self, group: Group) -> None:
        """Note which answers of a complete group passed, for the order of later passes; overlong ones did not."""
        rule = self.params.by_results
        if rule is not None:
            least, sampled = rule.pass_score, [meta for meta in group.samples.values() if not meta.baseline]
            passed = [meta.usable and (meta.header.score or 0.0) >= least for meta in sampled]
            self.table.passes.observe(group.place, passed, self.table.committed)

    def _without_signal(self, usable: Sequence[SampleMeta]) -> bool:
        """Whether every metric of the dynamic-sampling filter has one value in the whole group."""
        metrics = self.params.filter_metrics
        if not metrics:
            return False
        rewards = [meta.header.rewards for meta in usable]
        return all(len({values.get(name) for values in rewards}) == 1 for name in metrics)

    @property
    def starves(self) -> bool:
        """Whether dynamic sampling has dropped more than its refills may cost, and the next step is still not full.

        What it drops while the trainer is at work and the next step is full already only fills later steps.
        """
        table, params = self.table, self.params
        no_more = table.closed or table.exhausted or table.first_step >= table.total_steps
        if params.max_refills <= 0 or no_more or table.ready >= params.groups_per_step:
            return False
        return table.filtered > params.max_refills * params.groups_per_step

    @property
    def barren(self) -> Source | None:
        """A source of several that has nothing to train in passes on end: it would take the groups of all others."""
        table, mixture = self.table, self.table.mixture
        no_more = table.closed or table.exhausted or table.first_step >= table.total_steps
        if len(mixture) == 1 or no_more or self.params.unfinished:
            return None
        least = BARREN_STEPS * self.params.groups_per_step
        for source, share, dropped in zip(mixture.sources, mixture.shares, table.fruitless, strict=True):
            if share and dropped >= max(2 * source.rows, least):
                return source
        return None

    # ---- steps --------------------------------------------------------------------------------------------

    def assemble(self, now: float) -> Assembled | WaitingStep:
        """Fix the batch of the next step, or say what it waits for. Repeats the answer while it is batched."""
        batch = self.batch(self.table.committed)
        if batch is not None:
            return Assembled(self.table.committed, batch)
        result = self._choose(self.table.committed)
        if isinstance(result, WaitingStep):
            return self._wait_or_drop(result, now)
        if self._check_consumption(result.groups):
            return self.assemble(now)
        self.table.waiting_since, self.table.filtered = None, 0
        for group in result.groups:
            group.step = result.step
            self.table.move(group, GroupState.BATCHED)
        for group in result.surplus:
            self.table.drop(group, DropReason.SURPLUS)
        return Assembled(result.step, self.batch(result.step) or [])

    def prefetch(self) -> Assembled | WaitingStep:
        """Return what the batch after the next one would be if that were committed now. Changes nothing."""
        return self._choose(self.table.committed + 1)

    def _choose(self, step: int) -> Assembled | WaitingStep:
        table = self.table
        return choose(
            step,
            table.by_deadline,
            table.leased_by_deadline,
            self.params.groups_per_step,
            more_to_come=not (table.exhausted or table.closed or step >= table.total_steps),
            drop_surplus=self.params.oversample > 1.0,
        )

    def _check_consumption(self, groups: Sequence[Group]) -> bool:
        """The safety net: no chosen group may hold tokens beyond the bound. Admission makes this impossible."""
        table, params = self.table, self.params
        over = [g for g in groups if params.deadline(g.oldest_version()) < table.committed]
        for group in over:
            table.totals.over_bound += len(group.samples)
            table.drop(group, DropReason.STALE)
        return bool(over)

    def _wait_or_drop(self, waiting: WaitingStep, now: float) -> Assembled | WaitingStep:
        if not waiting.stragglers:
            self.table.waiting_since = None
            return waiting
        if self.table.waiting_since is None or self.table.waiting_since[0] != self.table.committed:
            self.table.waiting_since = (self.table.committed, now)
        timeout = self.params.straggler_timeout
        late = timeout is not None and now - self.table.waiting_since[1] > timeout
        if self.params.on_stale != "drop" or not late:
            return waiting
        for group in waiting.stragglers:
            self.table.drop(group, DropReason.STALE)
        return self.assemble(now)

    def batch(self, step: int) -> list[Group] | None:
        """Groups of an assembled, uncommitted step in table order, or None."""
        if step != self.table.committed or not self.table.by_state[GroupState.BATCHED]:
            return None
        groups = self.table.in_state(GroupState.BATCHED)
        return sorted(groups, key=order)

    def commit(self, step: int) -> bool:
        """Finish a step; False if it was committed before."""
        table = self.table
        if step < table.committed:
            return False
        batch = self.batch(step)
        if batch is None:
            detail = f"step {step} cannot be committed: step {table.committed} is next and not assembled"
            raise ApiError(ErrorCode.WRONG_STEP, detail)
        for group in batch:
            table.totals.staleness.update(staleness_of(group))
            table.move(group, GroupState.TRAINED)
            if not self.params.keep_payloads or group.newest_version() > table.durable:
                table.drop_payloads(group)
        table.committed += 1
        table.compact()
        return True

    def close(self, reason: DropReason = DropReason.SURPLUS) -> bool:
        """No further step: drop what is waiting, leased or ready. False if it was closed before."""
        table = self.table
        if table.closed is not None:
            return False
        table.closed = reason
        for state in (GroupState.WAITING, GroupState.LEASED, GroupState.READY):
            for group in list(table.in_state(state)):
                table.drop(group, reason)
        return True

    # ---- checkpoints (see the module of this name) ---------------------------------------------------------

    def checkpoint(self, step: int) -> int:
        """A checkpoint of `step` steps is complete. Returns how many steps are durable."""
        return checkpoint.make_durable(self.table, step)

    def snapshot(self, step: int) -> LedgerSnapshot:
        return checkpoint.snapshot(self.table, step)

    def rewind(self, step: int, timeline: int | None = None) -> None:
        checkpoint.rewind(self.table, step, timeline)

    def check_snapshot(self, snapshot: LedgerSnapshot) -> None:
        checkpoint.check_snapshot(snapshot, self.params)

    def begin_from(self, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None) -> None:
        checkpoint.begin_from(self.table, snapshot, timeline, began)
