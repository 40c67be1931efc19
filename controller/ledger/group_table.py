"""The book that the ledger keeps: all groups by state, their deadlines, and the only ways to change one.

Every change goes through `_move` or one of the few functions around it, so that three things always agree: the state
of a group, the index by state, and the multiset of deadlines that admission looks at. What changed is remembered
until `take_changes` hands it out for writing.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from controller.ledger.archive import History
from controller.ledger.group import OUTSTANDING, DropReason, Group, SampleMeta, State, group_id
from controller.ledger.reconcile import Lineage
from controller.ledger.values import Changes, LedgerParams, Totals
from schema.wire.messages import LedgerStatus


class Book:
    """See the module's docstring."""

    def __init__(self, params: LedgerParams, new_lease_id: Callable[[], str] | None = None) -> None:
        self.params = params
        self.groups: dict[str, Group] = {}
        self.committed = 0
        self.durable = 0
        self.timeline = 0
        self.began = 0
        """Step at which the present timeline began."""
        self.lineage = Lineage()
        self.frontier = 0
        self.closed: DropReason | None = None
        self.totals = Totals()
        self._new_lease_id = new_lease_id or (lambda: secrets.token_urlsafe(12))
        self.history = History()
        self._by_state: dict[State, dict[str, Group]] = {state: {} for state in State}
        self._deadlines: Counter[int] = Counter()
        self._missed: Counter[str] = Counter()
        self._suspects: set[str] = set()
        """Groups that are leased alone (see `_crashed`); nearly always empty."""
        self._by_lease: dict[str, Group] = {}
        self._by_replica: dict[str, dict[str, Group]] = {}
        """Leased groups by who holds them."""
        self._by_deadline: dict[int, dict[str, Group]] = {}
        """Ready groups."""
        self._queue: list[tuple[int, int]] = []
        """A heap of (epoch, position) with all waiting groups, and some that were waiting once."""
        self._dirty: dict[str, Group] = {}
        self._dirty_samples: dict[str, Group] = {}
        self._dropped_payloads: list[tuple[str, str]] = []
        self._removed: set[str] = set()

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
    def epochs(self) -> int:
        """Epochs of which every position was trained or dropped."""
        complete = self.frontier // self.params.n_positions
        pending = (group.epoch for state in (State.WAITING, *OUTSTANDING) for group in self.in_state(state))
        return min(pending, default=complete)

    @property
    def first_step(self) -> int:
        """b: the first step with free slots."""
        return self.committed + (1 if self._by_state[State.BATCHED] else 0)

    @property
    def deadlines(self) -> Counter[int]:
        """Deadlines of all leased and ready groups (a copy)."""
        return self._deadlines.copy()

    def in_state(self, state: State) -> Iterable[Group]:
        """Groups that are kept whole, by state."""
        return self._by_state[state].values()

    @property
    def has_suspects(self) -> bool:
        """Whether some group may only be leased alone."""
        return bool(self._suspects)

    def held_by(self, replica_id: str) -> list[Group]:
        """Groups that a replica has leased."""
        return list(self._by_replica.get(replica_id, {}).values())

    def find(self, name: str) -> Group | None:
        """A group; of one that is not kept whole any more there is but state, step and reason."""
        group = self.groups.get(name)
        if group is None:
            epoch, _, position = name.removeprefix("e").partition("-p")
            if epoch.isdecimal() and position.isdecimal() and len(name) <= 64:
                group = self._remembered(int(epoch) * self.params.n_positions + int(position))
        return group if group is not None and group.id == name else None

    def in_order(self, offset: int, limit: int) -> list[Group]:
        """Groups of all states in the order of the stream, as far as they are known."""
        found: list[Group] = []
        skip = offset
        for at in range(self.frontier):
            group = self.groups.get(group_id(*divmod(at, self.params.n_positions))) or self._remembered(at)
            if group is None:
                continue
            if skip:
                skip -= 1
                continue
            found.append(group)
            if len(found) >= limit:
                break
        return found

    def _remembered(self, at: int) -> Group | None:
        """What the history knows of a position of the stream, as a group."""
        if at not in self.history:
            return None
        epoch, position = divmod(at, self.params.n_positions)
        step, reason = self.history.step_of(at), self.history.reason_of(at)
        group = Group(epoch, position, payload_kept=False, step=step)
        if reason is not None:
            group.state, group.reason = State.DROPPED, DropReason(reason)
        else:
            assert step is not None
            group.state = State.DURABLE if step < self.durable else State.TRAINED
        return group

    def status(self) -> LedgerStatus:
        states = {state.value: len(groups) for state, groups in self._by_state.items()}
        durable = self.history.trained_before(self.durable)
        states[State.DURABLE.value] += self.totals.trained_before + durable
        states[State.TRAINED.value] += self.history.trained - durable
        forgotten = self.totals.dropped_before + self.history.dropped
        dropped = Counter(group.reason.value for group in self.in_state(State.DROPPED) if group.reason)
        dropped.update(forgotten)
        states[State.DROPPED.value] += forgotten.total()
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
        removed = []
        for name in self._removed:
            again = self.groups.get(name)
            if again is None:
                removed.append(name)
            else:  # made anew since: its stored samples are those of its past
                self._dirty_samples[name] = again
        changes = Changes(
            list(self._dirty.values()),
            self._dropped_payloads,
            self.header(),
            removed,
            list(self._dirty_samples.values()),
            self.history.take_changes(),
        )
        self._dirty, self._dirty_samples, self._dropped_payloads, self._removed = {}, {}, [], set()
        return changes

    def header(self) -> dict[str, Any]:
        """The ledger's own numbers, as plain values."""
        return {
            "committed": self.committed,
            "durable": self.durable,
            "timeline": self.timeline,
            "began": self.began,
            "lineage": self.lineage.to_record(),
            "frontier": self.frontier,
            "closed": None if self.closed is None else self.closed.value,
            "staleness": dict(self.totals.staleness),
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
        rows: Mapping[str, Sequence[Any]],
        samples: Mapping[str, Sequence[Any]],
        history: Mapping[str, Any],
        new_lease_id: Callable[[], str] | None = None,
    ) -> Self:
        """Rebuild from what `take_changes` handed out: rows of groups, of their samples, and of the history."""
        ledger = cls(params, new_lease_id)
        ledger.committed, ledger.durable = header["committed"], header["durable"]
        ledger.timeline, ledger.began = header["timeline"], header["began"]
        ledger.lineage = Lineage.from_header(header)
        ledger.frontier = header["frontier"]
        ledger.closed = None if header["closed"] is None else DropReason(header["closed"])
        ledger.totals = Totals(
            staleness=Counter({int(k): v for k, v in header["staleness"].items()}),
            duplicates=header["duplicates"],
            over_bound=header["over_bound"],
            trained_before=header["trained_before"],
            dropped_before=Counter(header["dropped_before"]),
        )
        ledger.history = History.restore(history)
        for name, row in rows.items():
            ledger._insert(Group.from_rows(row, samples.get(name, ())))
        return ledger

    def _insert(self, group: Group) -> None:
        self.groups[group.id] = group
        self._enter(group)
        if group.state in (State.WAITING, State.LEASED):
            self._suspect(group)

    # ---- the only ways to change a group ------------------------------------------------------------------

    def _create(self) -> Group:
        """The next position of the stream, waiting."""
        epoch, position = divmod(self.frontier, self.params.n_positions)
        group = Group(epoch, position)
        self.frontier += 1
        self.groups[group.id] = group
        self._enter(group)
        self._dirty[group.id] = group
        return group

    def _move(self, group: Group, state: State, *, deadline: int | None = None) -> None:
        self._leave(group)
        group.state = state
        if deadline is not None:
            group.deadline = deadline
        if state is not State.LEASED:
            if group.lease_id is not None:
                self._missed.pop(group.lease_id, None)
            group.lease_id = group.replica_id = group.request_id = None
            self._suspects.discard(group.id)
        if state is State.WAITING:
            self._suspect(group)
        self._enter(group)
        self._dirty[group.id] = group

    def _enter(self, group: Group) -> None:
        """Note a group in all indices of its state."""
        state, name = group.state, group.id
        self._by_state[state][name] = group
        if state is State.LEASED:
            self._deadlines[group.deadline] += 1
            self._by_lease[group.lease_id or ""] = group
            self._by_replica.setdefault(group.replica_id or "", {})[name] = group
        elif state is State.READY:
            self._deadlines[group.deadline] += 1
            self._by_deadline.setdefault(group.deadline, {})[name] = group
        elif state is State.WAITING:
            heapq.heappush(self._queue, (group.epoch, group.position))

    def _leave(self, group: Group) -> None:
        """Take a group out of all indices of its state."""
        state, name = group.state, group.id
        del self._by_state[state][name]
        if state is State.LEASED:
            self._uncount(group.deadline)
            if self._by_lease.get(group.lease_id or "") is group:
                del self._by_lease[group.lease_id or ""]
            _take(self._by_replica, group.replica_id or "", name)
        elif state is State.READY:
            self._uncount(group.deadline)
            _take(self._by_deadline, group.deadline, name)

    def _uncount(self, deadline: int) -> None:
        if self._deadlines[deadline] > 1:
            self._deadlines[deadline] -= 1
        else:
            del self._deadlines[deadline]

    def _first_waiting(self) -> Group | None:
        """The waiting group that comes first in the stream."""
        waiting = self._by_state[State.WAITING]
        if not waiting:
            self._queue.clear()
            return None
        while (group := waiting.get(group_id(*self._queue[0]))) is None:
            heapq.heappop(self._queue)
        return group

    def _hand_over(self, group: Group, replica_id: str) -> None:
        """The holder of a lease has a new id."""
        self._leave(group)
        group.replica_id = replica_id
        self._enter(group)
        self._dirty[group.id] = group

    def _forget_all(self) -> None:
        """No group is known any more; their stored rows and payloads go."""
        for group in self.groups.values():
            self._discard_samples(group)
        self._removed.update(self.groups)
        self.groups, self._dirty, self._dirty_samples = {}, {}, {}
        self._by_state = {state: {} for state in State}
        for index in (self._deadlines, self._missed, self._by_lease, self._by_replica, self._by_deadline):
            index.clear()
        self._suspects.clear()
        self._queue.clear()
        self.history.clear()

    def _compact(self) -> None:
        """Keep but the newest of the trained and of the dropped groups whole, and those with a payload."""
        self._compact_trained(State.DURABLE)
        self._compact_trained(State.TRAINED)
        dropped = self._by_state[State.DROPPED]
        for group in list(islice(dropped.values(), max(0, len(dropped) - self.params.keep_recent))):
            assert group.reason is not None
            self.history.add_dropped(self._position_of(group), group.reason.value)
            self._remove(group)

    def _compact_trained(self, state: State) -> None:
        trained = self._by_state[state]
        keep = self.params.keep_recent - (len(self._by_state[State.TRAINED]) if state is State.DURABLE else 0)
        surplus = len(trained) - max(0, keep)
        for group in list(islice(trained.values(), max(0, surplus))):
            if group.payload_kept:
                continue
            assert group.step is not None
            self.history.add_trained(self._position_of(group), group.step, staleness_of(group))
            self._remove(group)

    def _remove(self, group: Group) -> None:
        self._leave(group)
        del self.groups[group.id]
        self._dirty.pop(group.id, None)
        self._dirty_samples.pop(group.id, None)
        self._removed.add(group.id)

    def _position_of(self, group: Group) -> int:
        """Its position in the stream."""
        return group.epoch * self.params.n_positions + group.position

    def _requeue(self, group: Group) -> None:
        self._move(group, State.WAITING)

    def _fail(self, group: Group, reason: DropReason) -> None:
        group.failures += 1
        if group.failures >= self.params.max_attempts:
            self._drop(group, reason)
        else:
            self._requeue(group)

    def _crashed(self, group: Group, alone: bool) -> None:
        """The holder crashed. What it held beside others is not to blame: only a group that was alone is dropped."""
        group.crashes += 1
        if alone and group.crashes >= self.params.max_attempts:
            group.error = (
                f"{group.crashes} replicas crashed while they held it, the last one held nothing else"
            )
            self._drop(group, DropReason.POISON)
        else:
            self._requeue(group)

    def _suspect(self, group: Group) -> None:
        """Note a group whose next crash would be the last attempt: it is leased alone, so that none is wronged."""
        if group.crashes >= max(1, self.params.max_attempts - 1):
            self._suspects.add(group.id)

    def _drop(self, group: Group, reason: DropReason) -> None:
        self._discard_samples(group)
        group.reason = reason
        self._move(group, State.DROPPED)

    def _put_samples(self, group: Group, samples: dict[int, SampleMeta]) -> None:
        """Replace its samples."""
        group.samples = samples
        self._dirty[group.id] = self._dirty_samples[group.id] = group

    def _discard_sample(self, group: Group, index: int) -> None:
        part = group.samples.pop(index).part
        if group.payload_kept and part not in group.parts():
            self._dropped_payloads.append((group.id, part))
        self._dirty[group.id] = self._dirty_samples[group.id] = group

    def _discard_samples(self, group: Group) -> None:
        if group.samples:
            if group.payload_kept:
                self._dropped_payloads += [(group.id, part) for part in group.parts()]
            self._put_samples(group, {})
        group.payload_kept = True

    def _drop_payloads(self, group: Group) -> None:
        """The bytes may go, what the ledger knows of the samples stays."""
        if group.payload_kept:
            group.payload_kept = False
            self._dropped_payloads += [(group.id, part) for part in group.parts()]
            self._dirty[group.id] = group


def staleness_of(group: Group) -> Counter[int]:
    """The samples of a trained group by staleness."""
    assert group.step is not None
    return Counter(
        group.step - meta.oldest_version(group.step) for meta in group.samples.values() if meta.usable
    )


def _take(index: dict[Any, dict[str, Group]], key: Any, name: str) -> None:
    """Remove an entry, and its key with the last one."""
    entries = index[key]
    del entries[name]
    if not entries:
        del index[key]
