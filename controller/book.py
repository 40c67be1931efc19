"""The book that the ledger keeps: all groups by state, their deadlines, and the only ways to change one.

Every change goes through `_move` or one of the few functions around it, so that three things always agree: the state
of a group, the index by state, and the multiset of deadlines that admission looks at. What changed is remembered
until `take_changes` hands it out for writing.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from controller.groups import OUTSTANDING, DropReason, Group, State
from controller.ledger_values import Changes, LedgerParams, Totals
from schema.wire.messages import LedgerStatus


class Book:
    """See the module's docstring."""

    def __init__(self, params: LedgerParams, new_lease_id: Callable[[], str] | None = None) -> None:
        self.params = params
        self.groups: dict[str, Group] = {}
        self.committed = 0
        self.durable = 0
        self.timeline = 0
        self.frontier = 0
        self.closed: DropReason | None = None
        self.totals = Totals()
        self._new_lease_id = new_lease_id or (lambda: secrets.token_urlsafe(12))
        self._by_state: dict[State, dict[str, Group]] = {state: {} for state in State}
        self._deadlines: Counter[int] = Counter()
        self._missed: Counter[str] = Counter()
        self._dirty: dict[str, Group] = {}
        self._dropped_payloads: list[tuple[str, int]] = []

    # ---- what others ask ----------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Steps of the whole job; fewer may follow where groups are dropped."""
        by_data = -(-self.params.total_positions // self.params.groups_per_step)
        return by_data if self.params.max_steps is None else min(by_data, self.params.max_steps)

    @property
    def exhausted(self) -> bool:
        """No position is left to lease."""
        return self.frontier >= self.params.total_positions and not self._by_state[State.WAITING]

    @property
    def outstanding(self) -> int:
        return sum(len(self._by_state[state]) for state in OUTSTANDING)

    @property
    def ready(self) -> int:
        return len(self._by_state[State.READY])

    @property
    def finished(self) -> bool:
        """No further step will be trained."""
        if self._by_state[State.BATCHED]:
            return False
        if self.closed is not None or self.committed >= self.total_steps:
            return True
        return self.exhausted and self.outstanding == 0

    @property
    def first_step(self) -> int:
        """b: the first step with free slots."""
        return self.committed + (1 if self._by_state[State.BATCHED] else 0)

    @property
    def deadlines(self) -> Counter[int]:
        """Deadlines of all leased and ready groups (a copy)."""
        return +self._deadlines

    def in_state(self, state: State) -> Iterable[Group]:
        return self._by_state[state].values()

    def status(self) -> LedgerStatus:
        states = {state.value: len(groups) for state, groups in self._by_state.items()}
        states[State.DURABLE.value] += self.totals.trained_before
        dropped = Counter(group.reason.value for group in self.in_state(State.DROPPED) if group.reason)
        dropped.update(self.totals.dropped_before)
        states[State.DROPPED.value] += self.totals.dropped_before.total()
        return LedgerStatus(
            created=self.frontier,
            states=states,
            dropped=dict(dropped),
            staleness=dict(sorted(self.totals.staleness.items())),
            max_staleness=max(self.totals.staleness, default=0),
            bound=self.params.staleness_bound,
            over_bound=self.totals.over_bound,
            duplicates=self.totals.duplicates,
        )

    # ---- storing ------------------------------------------------------------------------------------------

    def take_changes(self) -> Changes:
        """Everything that changed since the last call; the caller writes it in one transaction."""
        changes = Changes(list(self._dirty.values()), self._dropped_payloads, self.header())
        self._dirty, self._dropped_payloads = {}, []
        return changes

    def header(self) -> dict[str, Any]:
        """The ledger's own numbers, as plain values."""
        return {
            "committed": self.committed,
            "durable": self.durable,
            "timeline": self.timeline,
            "frontier": self.frontier,
            "closed": None if self.closed is None else self.closed.value,
            "staleness": {str(k): v for k, v in self.totals.staleness.items()},
            "duplicates": self.totals.duplicates,
            "over_bound": self.totals.over_bound,
            "trained_before": self.totals.trained_before,
            "dropped_before": dict(self.totals.dropped_before),
        }

    @classmethod
    def restore(
        cls,
        params: LedgerParams,
        header: Mapping[str, Any],
        records: Iterable[Mapping[str, Any]],
        new_lease_id: Callable[[], str] | None = None,
    ) -> Self:
        """Rebuild from what `take_changes` handed out."""
        ledger = cls(params, new_lease_id)
        ledger.committed, ledger.durable = header["committed"], header["durable"]
        ledger.timeline, ledger.frontier = header["timeline"], header["frontier"]
        ledger.closed = None if header["closed"] is None else DropReason(header["closed"])
        ledger.totals = Totals(
            staleness=Counter({int(k): v for k, v in header["staleness"].items()}),
            duplicates=header["duplicates"],
            over_bound=header["over_bound"],
            trained_before=header["trained_before"],
            dropped_before=Counter(header["dropped_before"]),
        )
        for record in records:
            ledger._insert(Group.from_record(record))
        return ledger

    def _insert(self, group: Group) -> None:
        self.groups[group.id] = group
        self._by_state[group.state][group.id] = group
        if group.state in (State.LEASED, State.READY):
            self._deadlines[group.deadline] += 1

    # ---- the only ways to change a group ------------------------------------------------------------------

    def _move(self, group: Group, state: State, *, deadline: int | None = None) -> None:
        counted = (State.LEASED, State.READY)
        if group.state in counted:
            self._deadlines[group.deadline] -= 1
        del self._by_state[group.state][group.id]
        group.state = state
        if deadline is not None:
            group.deadline = deadline
        if state in counted:
            self._deadlines[group.deadline] += 1
        if state is not State.LEASED:
            if group.lease_id is not None:
                self._missed.pop(group.lease_id, None)
            group.lease_id = group.replica_id = group.request_id = None
        self._by_state[state][group.id] = group
        self._dirty[group.id] = group

    def _requeue(self, group: Group) -> None:
        self._move(group, State.WAITING)

    def _fail(self, group: Group, reason: DropReason) -> None:
        group.failures += 1
        if group.failures >= self.params.max_attempts:
            self._drop(group, reason)
        else:
            self._requeue(group)

    def _drop(self, group: Group, reason: DropReason) -> None:
        self._discard_samples(group)
        group.reason = reason
        self._move(group, State.DROPPED)

    def _discard_sample(self, group: Group, index: int) -> None:
        del group.samples[index]
        if group.payload_kept:
            self._dropped_payloads.append((group.id, index))
        self._dirty[group.id] = group

    def _discard_samples(self, group: Group) -> None:
        for index in list(group.samples):
            self._discard_sample(group, index)
        group.payload_kept = True

    def _drop_payloads(self, group: Group) -> None:
        """The bytes may go, what the ledger knows of the samples stays."""
        if group.payload_kept:
            group.payload_kept = False
            self._dropped_payloads += [(group.id, index) for index in group.samples]
            self._dirty[group.id] = group
