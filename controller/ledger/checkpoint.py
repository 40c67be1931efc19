"""Checkpoints and the way back to them: what becomes durable, and what a rewind makes of each group.

A checkpoint after c steps contains their weights. Going back to it, a group that was trained since, or waits to
be, is ready again if its payload is kept and every token is of a version that the checkpoint contains; all others
are generated again. A job also resumes from a checkpoint alone, with an empty store: `LedgerSnapshot` says which
positions of the stream it leaves untrained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Self

from controller.ledger.group import DropReason, Group, State
from controller.ledger.group_table import Book, staleness_of
from controller.ledger.values import LedgerError, LedgerParams, Totals
from schema.wire.messages import ErrorCode, LedgerSnapshot

BEGINNING = LedgerSnapshot(committed_steps=0, timeline=0, frontier=0, untrained=[])
"""What a checkpoint before the first step would store: a ledger that began later goes back there with it."""


class Rewindable(Book):
    """A book that knows checkpoints."""

    def checkpoint(self, step: int) -> int:
        """A checkpoint that contains `step` committed steps is complete: they are durable."""
        if step > self.committed:
            raise LedgerError(
                ErrorCode.WRONG_STEP, f"checkpoint of step {step}, committed are {self.committed}"
            )
        for group in list(self.in_state(State.TRAINED)):
            if group.step is not None and group.step < step:
                self._drop_payloads(group)
                self._move(group, State.DURABLE)
        self.durable = max(self.durable, step)
        self._compact()
        return self.durable

    def snapshot(self, step: int) -> LedgerSnapshot:
        """What a checkpoint after `step` committed steps stores: enough to go on with an empty store."""
        if step > self.committed:
            raise LedgerError(
                ErrorCode.WRONG_STEP, f"snapshot of step {step}, committed are {self.committed}"
            )
        done = (State.TRAINED, State.DURABLE)
        untrained = [
            group.epoch * self.params.n_positions + group.position
            for group in self.groups.values()
            if group.state is not State.DROPPED
            and not (group.state in done and group.step is not None and group.step < step)
        ]
        untrained += self.history.trained_since(step)
        return LedgerSnapshot(
            committed_steps=step,
            timeline=self.timeline,
            frontier=self.frontier,
            untrained=sorted(untrained),
            dropped=self.status().dropped,
            staleness=self._staleness_before(step),
            n_positions=self.params.n_positions,
            order=self.params.order or None,
        )

    def _staleness_before(self, step: int) -> Counter[int]:
        """Samples trained in steps below `step` by staleness."""
        since = self.history.staleness_since(step)
        for state in (State.TRAINED, State.DURABLE):
            for group in self.in_state(state):
                if group.step is not None and group.step >= step:
                    since.update(staleness_of(group))
        return self.totals.staleness - since

    def abandon_step(self) -> int:
        """The trainers of an assembled step are gone: its groups are ready again."""
        batch = list(self.in_state(State.BATCHED))
        for group in batch:
            group.step = None
            self._move(group, State.READY)
        return len(batch)

    def rewind(self, step: int, timeline: int | None = None) -> None:
        """Go back to the checkpoint after `step` steps; a new timeline begins (its number, if it has one already).

        Groups trained since, or waiting to be, are ready again if their payload is kept and every token is of a
        version that the checkpoint contains; all others are generated again. Drops stay final. All leases end:
        their holders may have loaded weights meanwhile that the checkpoint does not contain.
        """
        if step > self.committed:
            raise LedgerError(
                ErrorCode.CONFLICT, f"cannot rewind to step {step}: only {self.committed} are done"
            )
        if step < self.lineage.floor:
            if step:
                detail = f"cannot rewind to step {step}: nothing is known below {self.lineage.floor}"
                raise LedgerError(ErrorCode.CONFLICT, detail)
            return self.begin_from(BEGINNING, timeline)
        for group in list(self.groups.values()):
            trained_since = group.state in (State.TRAINED, State.DURABLE) and (group.step or 0) >= step
            if group.state is State.READY or group.state is State.BATCHED or trained_since:
                if trained_since:
                    self._forget_staleness(group)
                self._take_back(group, step)
            elif group.state is State.LEASED:
                self._requeue(group)
            if group.state is State.WAITING:
                for index, meta in list(group.samples.items()):
                    if meta.newest > step:
                        self._discard_sample(group, index)
        self._make_again(step)
        self.committed = self.began = step
        self.durable = min(self.durable, step)
        self.timeline = self.timeline + 1 if timeline is None else timeline
        self.lineage.begin(self.timeline, step)
        self.closed = None

    def _make_again(self, step: int) -> None:
        """Groups that were trained in `step` or later and are not kept whole: they wait, as if new."""
        positions, staleness = self.history.rewind(step)
        for at in positions:
            group = Group(*divmod(at, self.params.n_positions))
            self._insert(group)
            self._dirty[group.id] = group
        self.totals.staleness.subtract(staleness)
        self.totals.staleness = +self.totals.staleness

    def _take_back(self, group: Group, step: int) -> None:
        reusable = group.payload_kept and group.newest_version() <= step
        deadline = group.oldest_version() + self.params.staleness_bound
        group.step = None
        if reusable and deadline >= step:
            self._move(group, State.READY, deadline=deadline)
        else:
            self._discard_samples(group)
            self._move(group, State.WAITING)

    def _forget_staleness(self, group: Group) -> None:
        self.totals.staleness -= staleness_of(group)

    def begin_from(
        self, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None
    ) -> None:
        """Go on from a checkpoint: what it left untrained waits, all that this ledger knew is forgotten.

        A new timeline begins, unless the caller says which one it is and where it began.

        Raises:
            LedgerError: the snapshot cannot be of this job; nothing has changed.
        """
        self.check_snapshot(snapshot)
        self._forget_all()
        self.committed = self.durable = snapshot.committed_steps
        self.began = snapshot.committed_steps if began is None else began
        self.timeline = max(self.timeline, snapshot.timeline) + 1 if timeline is None else timeline
        self.lineage.begin_from(snapshot.timeline, self.committed, self.timeline, self.began)
        self.frontier, self.closed = snapshot.frontier, None
        self.totals = Totals(
            staleness=Counter(snapshot.staleness),
            dropped_before=Counter(snapshot.dropped),
            trained_before=snapshot.frontier - len(snapshot.untrained) - sum(snapshot.dropped.values()),
        )
        for stream_index in snapshot.untrained:
            epoch, position = divmod(stream_index, self.params.n_positions)
            group = Group(epoch, position)
            self._insert(group)
            self._dirty[group.id] = group

    def check_snapshot(self, snapshot: LedgerSnapshot) -> None:
        """Raises `LedgerError` as the function of this name."""
        check_snapshot(snapshot, self.params)

    @classmethod
    def from_snapshot(
        cls, params: LedgerParams, snapshot: LedgerSnapshot, new_lease_id: Callable[[], str] | None = None
    ) -> Self:
        """A ledger that goes on from a checkpoint with an empty store. Raises as `begin_from`."""
        ledger = cls(params, new_lease_id)
        ledger.begin_from(snapshot)
        return ledger


def check_snapshot(snapshot: LedgerSnapshot, params: LedgerParams) -> None:
    """Whether a snapshot can be of a job with these parameters.

    Raises:
        LedgerError: it is of other data, or its numbers contradict each other; says which and what to do.
    """
    if snapshot.n_positions not in (None, params.n_positions):
        raise _unusable(
            f"it was made with {snapshot.n_positions} prepared rows, this job has {params.n_positions}: positions "
            f"would be other prompts. Use the same data, or start from the checkpoint's exported weights "
            f"(policy.model_name_or_path) without resuming"
        )
    if snapshot.order is not None and params.order not in ("", snapshot.order):
        raise _unusable(
            "its rows are in another order: train.seed and train.train_policy.dataloader_shuffle must be what they "
            "were, else some prompts would be trained twice and others never"
        )
    if snapshot.frontier > params.total_positions:
        raise _unusable(
            f"{snapshot.frontier} positions were handed out, this job has {params.total_positions}: set train.epoch "
            f"and the data to what they were"
        )
    untrained = snapshot.untrained
    if any(a >= b for a, b in pairwise(untrained)) or (untrained and untrained[-1] >= snapshot.frontier):
        raise _unusable(f"its untrained positions must rise and lie below its frontier {snapshot.frontier}")
    unknown = snapshot.dropped.keys() - set(DropReason)
    if unknown:
        raise _unusable(f"it counts drops by {min(unknown)[:40]!r}, which is no reason to drop")
    if len(untrained) + sum(snapshot.dropped.values()) > snapshot.frontier:
        raise _unusable(
            f"{len(untrained)} untrained and {sum(snapshot.dropped.values())} dropped positions are more than the "
            f"{snapshot.frontier} that were handed out"
        )


def _unusable(why: str) -> LedgerError:
    return LedgerError(ErrorCode.CONFLICT, f"this job cannot go on from the checkpoint's ledger: {why}")
