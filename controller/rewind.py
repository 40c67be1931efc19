"""Checkpoints and the way back to them: what becomes durable, and what a rewind makes of each group.

A checkpoint after c steps contains their weights. Going back to it, a group that was trained since, or waits to
be, is ready again if its payload is kept and every token is of a version that the checkpoint contains; all others
are generated again. A job also resumes from a checkpoint alone, with an empty store: `LedgerSnapshot` says which
positions of the stream it leaves untrained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Self

from controller.book import Book
from controller.groups import Group, State
from controller.ledger_values import LedgerError, LedgerParams
from schema.wire.messages import ErrorCode, LedgerSnapshot


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
        return LedgerSnapshot(
            committed_steps=step,
            timeline=self.timeline,
            frontier=self.frontier,
            untrained=sorted(untrained),
            dropped=self.status().dropped,
        )

    def rewind(self, step: int) -> None:
        """Go back to the checkpoint after `step` steps; a new timeline begins.

        Groups trained since, or waiting to be, are ready again if their payload is kept and every token is of a
        version that the checkpoint contains; all others are generated again. Drops stay final.
        """
        if step > self.committed:
            raise LedgerError(
                ErrorCode.CONFLICT, f"cannot rewind to step {step}: only {self.committed} are done"
            )
        for group in list(self.groups.values()):
            trained_since = group.state in (State.TRAINED, State.DURABLE) and (group.step or 0) >= step
            if group.state is State.READY or group.state is State.BATCHED or trained_since:
                if trained_since:
                    self._forget_staleness(group)
                self._take_back(group, step)
            elif group.state is State.LEASED and group.lease_version > step:
                self._requeue(group)
            if group.state in (State.WAITING, State.LEASED):
                for index, meta in list(group.samples.items()):
                    if meta.header.newest_version > step:
                        self._discard_sample(group, index)
        self.committed = step
        self.durable = min(self.durable, step)
        self.timeline += 1
        self.closed = None

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
        assert group.step is not None
        for meta in group.samples.values():
            if meta.usable:
                self.totals.staleness[group.step - meta.oldest_version(group.step)] -= 1
        self.totals.staleness = +self.totals.staleness

    @classmethod
    def from_snapshot(
        cls, params: LedgerParams, snapshot: LedgerSnapshot, new_lease_id: Callable[[], str] | None = None
    ) -> Self:
        """Go on from a checkpoint with an empty store: what it left untrained is waiting, a timeline begins."""
        ledger = cls(params, new_lease_id)
        ledger.committed = ledger.durable = snapshot.committed_steps
        ledger.timeline, ledger.frontier = snapshot.timeline + 1, snapshot.frontier
        ledger.totals.dropped_before = Counter(snapshot.dropped)
        ledger.totals.trained_before = (
            snapshot.frontier - len(snapshot.untrained) - ledger.totals.dropped_before.total()
        )
        for stream_index in snapshot.untrained:
            epoch, position = divmod(stream_index, params.n_positions)
            group = Group(epoch, position)
            ledger._insert(group)
            ledger._dirty[group.id] = group
        return ledger
