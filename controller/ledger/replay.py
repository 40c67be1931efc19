"""What the ledger takes from others after its store has lost history: steps, a checkpoint's snapshot, leases.

`controller.ledger.reconcile` decides what is to be done and proves that it is right; here it is done to the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from pydantic import ValidationError

from controller.ledger.admission import schedulable
from controller.ledger.checkpoint import Rewindable
from controller.ledger.group import Group, SampleMeta, State, group_id
from controller.ledger.reconcile import overdue
from controller.ledger.values import CommitOutcome, LedgerError
from schema.wire.batch import StepTable
from schema.wire.messages import ErrorCode, HeldLease
from schema.wire.sample import SampleHeader

DONE = (State.TRAINED, State.DURABLE)


class Replayable(Rewindable):
    """A book that takes the word of those who remember more."""

    # ---- trainers -----------------------------------------------------------------------------------------

    def replay(self, table: StepTable) -> CommitOutcome:
        """Commit the next step as its trainer says that it was trained, whatever state its groups are in here.

        Raises:
            LedgerError: not the next step, or a table that cannot have been trained.
        """
        if table.step < self.committed:
            return CommitOutcome(self.committed, duplicate=True)
        if table.step > self.committed:
            detail = f"step {table.step} was replayed, but step {self.committed} is next"
            raise LedgerError(ErrorCode.WRONG_STEP, detail)
        positions = self._positions(table)
        samples = self._samples(table)
        self.abandon_step()
        self._hand_out(max(positions, default=-1) + 1)
        for index, position in enumerate(positions):
            self._train(self._take(position), table.step, samples.get(index, {}))
        self.committed += 1
        self._compact()
        self._give_up_overdue()
        return CommitOutcome(self.committed)

    def _positions(self, table: StepTable) -> list[int]:
        """Stream positions of the groups of a replayed table, all of which may be trained."""
        if len(table.group_ids) > self.params.groups_per_step:
            raise _cannot_be(
                table, f"it has {len(table.group_ids)} groups, {self.params.groups_per_step} at most"
            )
        positions = [self._position(name) for name in table.group_ids]
        if len(set(positions)) != len(positions):
            raise _cannot_be(table, "it names a group twice")
        forgotten = self.totals.dropped_before.total()
        for name, position in zip(table.group_ids, positions, strict=True):
            group = self.groups.get(name)
            if group is None and position < self.frontier and self.history.reason_of(position) is None:
                forgotten -= 1  # dropped, by a checkpoint that does not say which were
                if forgotten < 0 or position in self.history:
                    raise _cannot_be(table, f"group {name} was trained before")
            if group is not None and group.state in DONE:
                raise _cannot_be(table, f"group {name} was trained in step {group.step}")
        return positions

    def _samples(self, table: StepTable) -> dict[int, dict[int, SampleMeta]]:
        """The samples of each group of a table, by index of the group and of the sample."""
        found: dict[int, dict[int, SampleMeta]] = {}
        for group, rows in groupby(range(table.n_samples), key=lambda row: table.group[row]):
            for row in rows:
                meta = _sample(table, row)
                staleness = table.step - meta.oldest_version(table.step)
                if not 0 <= meta.index < self.params.n_samples:
                    raise _cannot_be(table, f"sample {meta.index} of {self.params.n_samples}")
                if meta.usable and not 0 <= staleness <= self.params.staleness_bound:
                    raise _cannot_be(table, f"row {row} is {staleness} steps old")
                found.setdefault(group, {})[meta.index] = meta
        return found

    def _train(self, group: Group, step: int, samples: dict[int, SampleMeta]) -> None:
        self._discard_samples(group)
        self._put_samples(group, samples)
        group.payload_kept = False
        group.reason, group.step = None, step
        for meta in samples.values():
            if meta.usable:
                self.totals.staleness[step - meta.oldest_version(step)] += 1
        self._move(group, State.TRAINED)

    def _take(self, position: int) -> Group:
        """The group at a position, also if it was dropped and is not kept whole any more.

        A drop that the store forgot may be decided otherwise the second time, and then be known again from an older
        checkpoint: what the weights contain counts.
        """
        group = self.groups.get(self._name(position))
        if group is None:
            if position in self.history:
                self.history.forget_drop(position)
            else:
                ((reason, _),) = self.totals.dropped_before.most_common(1)
                self.totals.dropped_before[reason] -= 1
            group = Group(*divmod(position, self.params.n_positions))
            self._insert(group)
        return group

    def _hand_out(self, frontier: int) -> None:
        """Create the positions below `frontier` that this ledger does not know of: they wait."""
        while self.frontier < frontier:
            self._create()

    def _give_up_overdue(self) -> None:
        """What was leased or ready in the past and cannot be trained in time any more is made again."""
        groups = [*self.in_state(State.LEASED), *self.in_state(State.READY)]
        worth = [len(group.samples) + (group.state is State.READY) for group in groups]
        jobs = [(group.deadline, worth[index]) for index, group in enumerate(groups)]
        slots = int(self.params.groups_per_step * self.params.oversample)
        for index in overdue(jobs, self.first_step, slots):
            self._discard_samples(groups[index])
            self._requeue(groups[index])

    def _position(self, name: str) -> int:
        """The position in the stream of a group's id. Raises `LedgerError` for one that does not exist."""
        epoch, _, position = name.removeprefix("e").partition("-p")
        if epoch.isdecimal() and position.isdecimal() and len(name) <= 64:
            at = int(epoch), int(position)
            if group_id(*at) == name and at[0] < self.params.n_epochs and at[1] < self.params.n_positions:
                return at[0] * self.params.n_positions + at[1]
        raise LedgerError(
            ErrorCode.BAD_REQUEST,
            f"{name[:80]!r} is no group of {self.params.n_epochs} epochs of {self.params.n_positions} positions",
        )

    def _name(self, position: int) -> str:
        return group_id(*divmod(position, self.params.n_positions))

    def lost_payloads(self, names: Sequence[str]) -> None:
        """Payloads of these groups of the assembled step are gone: they are made again, the step is open again."""
        self.abandon_step()
        for name in names:
            group = self.groups[name]
            self._discard_samples(group)
            self._requeue(group)

    # ---- rollout replicas ---------------------------------------------------------------------------------

    def adopt(self, replica_id: str, held: Sequence[HeldLease], now: float) -> list[str]:
        """Leases that a replica says it holds: known ones are its own, forgotten ones too if that is possible.

        A forgotten lease is taken back if its group waits for somebody, all samples that the replica has pushed under
        it are here, and it can be trained in time. Returns the ids of the others: that work is lost.
        """
        lost = []
        for lease in held:
            group = self.groups.get(lease.group_id)
            known = group is not None and group.state is State.LEASED and group.lease_id == lease.lease_id
            if not known:
                group = self._forgotten(lease)
            if group is None:
                lost.append(lease.lease_id)
                continue
            if not known:
                group.lease_id, group.lease_version, group.lease_step = (
                    lease.lease_id,
                    lease.version,
                    self.committed,
                )
                group.replica_id, group.request_id = replica_id, None
                group.attempt = max(group.attempt, 1)
                self._move(group, State.LEASED, deadline=self._deadline_of(group, lease.version))
            group.expires = now + self.params.lease_timeout
            self._hand_over(group, replica_id)
        return lost

    def _forgotten(self, lease: HeldLease) -> Group | None:
        """The group of a lease that this ledger does not know, if it can be taken back."""
        if lease.version < 0 or self.closed is not None or self.finished:
            return None
        try:
            position = self._position(lease.group_id)
        except LedgerError:
            return None
        window = (self.params.staleness_bound + 1) * int(self.params.groups_per_step * self.params.oversample)
        if position >= self.frontier + window:
            return None
        group = self.groups.get(lease.group_id)
        if position >= self.frontier:
            if lease.pushed or not self._fits(lease.version + self.params.staleness_bound):
                return None
            self._hand_out(position + 1)
            return self.groups[lease.group_id]
        if group is None or group.state is not State.WAITING or group.id in self._suspects:
            return None
        if not group.samples.keys() >= set(lease.pushed):
            return None
        return group if self._fits(self._deadline_of(group, lease.version)) else None

    def _deadline_of(self, group: Group, version: int) -> int:
        oldest = min([version, *(meta.oldest_version(version) for meta in group.samples.values())])
        return oldest + self.params.staleness_bound

    def _fits(self, deadline: int) -> bool:
        deadlines = self.deadlines
        deadlines[deadline] += 1
        slots = int(self.params.groups_per_step * self.params.oversample)
        return deadline >= self.first_step and schedulable(deadlines, self.first_step, slots)


def _sample(table: StepTable, row: int) -> SampleMeta:
    """What the ledger knew of a sample, from its row of a table."""
    rewards = {name: value for name, column in table.rewards.items() if (value := column[row]) is not None}
    fields = {
        "index": table.index[row],
        "prompt_tokens": table.prompt_tokens[row],
        "response_tokens": table.response_tokens[row],
        "total_tokens": table.total_tokens[row],
        "oldest_version": table.oldest_version[row],
        "newest_version": table.newest_version[row],
        "finish_reason": table.finish_reason[row],
        "rewards": rewards,
        "score": table.score[row],
    }
    try:
        return SampleMeta.of(SampleHeader.model_validate(fields), 0, "")
    except ValidationError as error:
        raise _cannot_be(table, f"row {row}: {error.errors(include_url=False)[0]['msg']}") from None


def _cannot_be(table: StepTable, why: str) -> LedgerError:
    return LedgerError(
        ErrorCode.CONFLICT, f"step {table.step} cannot have been trained as it is replayed: {why}"
    )
