"""The table of all groups: by state, with their deadlines, and the only ways to change one.

Every change goes through `move` or one of the few functions around it, so that three things always agree: the state
of a group, the index by state, and the multiset of deadlines that admission looks at. What changed is remembered
until `take_changes` hands it out for writing. `controller.ledger.ledger`, `checkpoint` and `replay` decide what to
change; here are no decisions.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Self

from controller.ledger.archive import Archive
from controller.ledger.group import OUTSTANDING, DropReason, Group, GroupState, SampleMeta, group_id, parse_group_id
from controller.ledger.pass_orders import RESULTS, PassOrders
from controller.ledger.step_counter import StepProgress, check_order
from controller.ledger.values import LedgerChanges, LedgerParams, LedgerTotals, Stride
from schema.wire.messages import LedgerStatus, SourceStatus
from schema.wire.mixture import OtherSourcesError

_FRUITLESS = (DropReason.ZERO_VARIANCE, DropReason.OVERLONG, DropReason.REWARD_ERROR)
REMEMBERED_LEASES = 1024
"""Ended leases that are remembered: those of more than a minute in most runs."""


class GroupTable(StepProgress):
    """See the module's docstring. The indices are for reading; only the methods below change them."""

    def __init__(self, params: LedgerParams) -> None:
        super().__init__()
        self.params = params
        self.groups: dict[str, Group] = {}
        self.mixture = params.mixture()
        self.passes = PassOrders(params.by_results, self.mixture.sources)
        self.stride = Stride(params.groups_per_step)
        self.closed: DropReason | None = None
        self.filtered = 0
        """Groups dropped by dynamic sampling since a step was assembled last."""
        self.fruitless = [0] * len(self.mixture)
        """Groups of each source that had nothing to train since one of it was ready last; not stored."""
        self.archive = Archive(len(self.mixture))
        self.by_state: dict[GroupState, dict[str, Group]] = {state: {} for state in GroupState}
        self.by_lease: dict[str, Group] = {}
        self.by_replica: dict[str, dict[str, Group]] = {}
        """Leased groups by who holds them."""
        self.by_deadline: dict[int, dict[str, Group]] = {}
        """Ready groups."""
        self.leased_by_deadline: dict[int, dict[str, Group]] = {}
        self.deadlines: Counter[int] = Counter()
        """The deadlines of all leased and ready groups."""
        self.other_rows = False
        """Whether its store was filled with other prepared rows of the same number."""
        self.succeeds = False
        """Whether this job had another table before, which may have granted leases that are not known here."""
        self.granted: set[str] = set()
        """Leases that were granted since this table was made from the store, as long as they last; not stored."""
        self.ended: deque[str] = deque(maxlen=REMEMBERED_LEASES)
        """Leases that ended since then, the oldest first; not stored."""
        self.suspects: set[str] = set()
        """Groups that are leased alone (see `crashed`); nearly always empty."""
        self.waiting_since: tuple[int, float] | None = None
        """The step that waits for stragglers, and since when; not stored."""
        self._queue: list[tuple[int, int, int]] = []
        """A heap of places with all waiting groups, and some that were waiting once."""
        self._dirty: dict[str, Group] = {}
        self._dirty_samples: dict[str, Group] = {}
        self._dropped_payloads: list[tuple[str, str]] = []
        self._removed: set[str] = set()
        self._dropped: list[Group] = []
        """Since the last `take_changes`."""

    # ---- questions ----------------------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        """Steps of the whole job; fewer may follow where groups are dropped."""
        if self.params.unfinished:
            return self.params.max_steps or 0
        by_data = self.stride.steps(self.mixture.total)
        return by_data if self.params.max_steps is None else min(by_data, self.params.max_steps)

    @property
    def frontier(self) -> int:
        """Positions of the stream that were handed out."""
        return self.mixture.handed_out

    @property
    def unleased(self) -> bool:
        """Whether there are positions that were never handed out."""
        return self.mixture.next() is not None

    @property
    def exhausted(self) -> bool:
        """No position is left to lease."""
        return not self.params.unfinished and not self.by_state[GroupState.WAITING] and not self.unleased

    @property
    def awaits_rows(self) -> bool:
        """No position can be leased until further rows are prepared."""
        return self.params.unfinished and not self.by_state[GroupState.WAITING] and not self.unleased

    @property
    def used(self) -> int:
        """Groups that were trained or dropped."""
        return self.frontier - self.outstanding - len(self.by_state[GroupState.WAITING])

    @property
    def outstanding(self) -> int:
        return sum(len(self.by_state[state]) for state in OUTSTANDING)

    @property
    def ready(self) -> int:
        return len(self.by_state[GroupState.READY])

    @property
    def leased(self) -> int:
        """How many groups replicas hold."""
        return len(self.by_state[GroupState.LEASED])

    @property
    def held(self) -> list[Group]:
        """Groups under lease."""
        return list(self.by_state[GroupState.LEASED].values())

    @property
    def finished(self) -> bool:
        """No further step will be trained."""
        if self.by_state[GroupState.BATCHED]:
            return False
        if self.closed is not None or self.committed >= self.total_steps:
            return True
        return self.exhausted and self.outstanding == 0

    @property
    def passes_done(self) -> int:
        """Epochs of which every position was trained or dropped."""
        if self.params.unfinished:
            return 0
        if len(self.mixture) > 1:
            return (
                self.frontier - self.outstanding - len(self.by_state[GroupState.WAITING])
            ) // self.params.n_positions
        complete = self.frontier // self.params.n_positions
        pending = (group.epoch for state in (GroupState.WAITING, *OUTSTANDING) for group in self.in_state(state))
        return min(pending, default=complete)

    @property
    def first_step(self) -> int:
        """b: the first step with free slots."""
        return self.committed + (1 if self.by_state[GroupState.BATCHED] else 0)

    def in_state(self, state: GroupState) -> Iterable[Group]:
        """Groups that are kept whole, by state."""
        return self.by_state[state].values()

    def held_by(self, replica_id: str) -> list[Group]:
        """Groups that a replica has leased."""
        return list(self.by_replica.get(replica_id, {}).values())

    def find(self, name: str) -> Group | None:
        """A group; of one that is not kept whole any more there is but state, step and reason."""
        group = self.groups.get(name)
        if group is None and (place := parse_group_id(name)) is not None:
            group = None if (at := self.mixture.find(*place)) is None else self._archived(at)
        return group if group is not None and group.id == name else None

    def misfits(self, group: Group) -> bool:
        """Whether its samples are not those that groups of this job have: others, or too few for its state."""
        params, open_states = self.params, (GroupState.WAITING, GroupState.LEASED)
        foreign = any(
            index >= params.group_size or meta.baseline != (index == params.baseline)
            for index, meta in group.samples.items()
        )
        return foreign or (group.state not in open_states and len(group.samples) < params.group_size)

    def in_order(self, offset: int, limit: int) -> list[Group]:
        """Groups of all states in the order of the stream, as far as they are known."""
        page: list[Group] = []
        skip = offset
        for at in self.mixture.handed_out_places():
            group = self.groups.get(group_id(*self.mixture.place(at))) or self._archived(at)
            if group is None:
                continue
            if skip:
                skip -= 1
                continue
            page.append(group)
            if len(page) >= limit:
                break
        return page

    def _archived(self, at: int) -> Group | None:
        """Return what the archive knows of a position of the stream, as a group."""
        if at not in self.archive:
            return None
        step, reason = self.archive.step_of(at), self.archive.reason_of(at)
        group = self._group(at)
        group.payload_kept, group.step = False, step
        if reason is not None:
            group.state, group.reason = GroupState.DROPPED, DropReason(reason)
        else:
            assert step is not None
            group.state = GroupState.DURABLE if step < self.durable else GroupState.TRAINED
        return group

    def status(self) -> LedgerStatus:
        states = {state.value: len(groups) for state, groups in self.by_state.items()}
        durable = self.archive.trained_before(self.durable)
        states[GroupState.DURABLE.value] += self.totals.trained_before + durable
        states[GroupState.TRAINED.value] += self.archive.trained - durable
        forgotten = self.totals.dropped_before + self.archive.dropped
        dropped = Counter(group.reason.value for group in self.in_state(GroupState.DROPPED) if group.reason)
        dropped.update(forgotten)
        states[GroupState.DROPPED.value] += forgotten.total()
        return LedgerStatus(
            created=self.frontier,
            states=states,
            dropped=dict(dropped),
            staleness=dict(sorted(self.totals.staleness.items())),
            max_staleness=max(self.totals.staleness, default=0),
            bound=self.params.staleness_bound,
            over_bound=self.totals.over_bound,
            duplicates=self.totals.duplicates,
            sources=self._sources(),
        )

    def _sources(self) -> list[SourceStatus]:
        mixture = self.mixture
        if len(mixture) == 1:
            return []
        open_groups = (group for state in (GroupState.WAITING, *OUTSTANDING) for group in self.in_state(state))
        in_flight = Counter(group.source for group in open_groups)
        return [
            SourceStatus(
                name=source.name,
                rows=source.rows,
                share=share,
                drawn=drawn,
                dropped=dropped,
                in_flight=in_flight[k],
                trained=drawn - dropped - in_flight[k],
            )
            for k, (source, share, drawn, dropped) in enumerate(
                zip(mixture.sources, mixture.shares, mixture.drawn, mixture.dropped, strict=True)
            )
        ]

    # ---- storing ------------------------------------------------------------------------------------------

    def take_changes(self) -> LedgerChanges:
        """Everything that changed since the last call; the caller writes it in one transaction."""
        removed = []
        for name in self._removed:
            again = self.groups.get(name)
            if again is None:
                removed.append(name)
            else:  # made anew since: its stored samples are those of its past
                self._dirty_samples[name] = again
        changes = LedgerChanges(
            list(self._dirty.values()),
            self._dropped_payloads,
            self.header(),
            removed,
            list(self._dirty_samples.values()),
            {**self.archive.take_changes(), **self.passes.take_changes()},
            self._dropped,
        )
        self._dirty, self._dirty_samples, self._dropped_payloads, self._removed = {}, {}, [], set()
        self._dropped = []
        return changes

    def header(self) -> dict[str, Any]:
        return super().header() | {
            "frontier": self.frontier,
            "order": self.params.order,
            "n_positions": self.params.n_positions,
            "data": self.params.data,
            "bound": self.params.staleness_bound,
            "stride": asdict(self.stride),
            **({"mixture": self.mixture.to_record()} if len(self.mixture) > 1 else {}),
            "closed": None if self.closed is None else self.closed.value,
            "staleness": dict(self.totals.staleness),
            "filtered": self.filtered,
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
        archive: Mapping[str, Any],
    ) -> Self:
        """Rebuild from what `take_changes` handed out: rows of groups, of their samples, and of the archive.

        Raises `OtherSourcesError`: they are of a job with others, or with another order of its rows.
        """
        if header["frontier"]:
            check_order(header, params.order)
        table = cls(params)
        table.succeeds = True
        table.load(header)
        before = header.get("n_positions")
        if before in params.grown and header["frontier"] > before:
            raise OtherSourcesError(f"its first pass over {before} rows is over, and now there are more rows")
        if header["frontier"] and len(table.mixture) == 1 and before not in (None, params.n_positions, *params.grown):
            raise OtherSourcesError(
                f"the run began with {before} prepared rows, and now there are {params.n_positions}: positions would "
                "be other prompts. Name the same data (files, max_samples, filters) with --set or --config, or begin "
                "a new run from an exported checkpoint"
            )
        if header["frontier"]:
            table.load_mixture(header.get("mixture"), header["frontier"])
        same_number = header["frontier"] and before == params.n_positions
        table.other_rows = bool(same_number) and header.get("data", params.data) != params.data
        table.closed = None if header["closed"] is None else DropReason(header["closed"])
        table.filtered = header.get("filtered", 0)
        table.totals = LedgerTotals(
            staleness=Counter({int(k): v for k, v in header["staleness"].items()}),
            duplicates=header["duplicates"],
            over_bound=header["over_bound"],
            trained_before=header["trained_before"],
            dropped_before=Counter(header["dropped_before"]),
        )
        results = {name: row for name, row in archive.items() if name.startswith(RESULTS)}
        table.passes.restore(results)
        ended = {name: row for name, row in archive.items() if name not in results}
        table.archive = Archive.restore(ended, len(table.mixture))
        for name, row in rows.items():
            table._insert(Group.from_rows(row, samples.get(name, ())))
        kept = Stride(**header.get("stride", {"per_step": params.groups_per_step}))
        table.stride = kept.of(params.groups_per_step, table.committed, table.used)
        if table.stride is not kept and params.stages and table.used:
            raise OtherSourcesError(
                f"a step had {kept.per_step} groups, and now has {params.groups_per_step}: stages of the curriculum "
                "begin with groups, which would be of other steps; keep the batch and the group size"
            )
        return table

    def remake_misfits(self) -> None:
        """After a start with groups of another size: those that do not fit are made again."""
        misfits = [
            group
            for state in (GroupState.WAITING, *OUTSTANDING)
            for group in self.in_state(state)
            if self.misfits(group)
        ]
        if any(group.state is GroupState.BATCHED for group in misfits):
            self.abandon_step()
        for group in misfits:
            self.discard_samples(group)
            self.requeue(group)

    def _insert(self, group: Group) -> None:
        self.groups[group.id] = group
        self._enter(group)
        if group.state in (GroupState.WAITING, GroupState.LEASED):
            self.suspect(group)

    # ---- the only ways to change a group ------------------------------------------------------------------

    def load_mixture(self, record: Mapping[str, Any] | None, frontier: int) -> None:
        """Continue with what was drawn of each source; None: there is one. Raises `OtherSourcesError`."""
        if record is not None or len(self.mixture) > 1:
            self.mixture.load(record or GroupTable(replace(self.params, sources=())).mixture.to_record())
        else:
            self.mixture.drawn[0] = frontier

    def grow(self, params: LedgerParams) -> None:
        """Go on with all rows, now that those are prepared which were missing. params: the same but for the rows."""
        record = self.mixture.to_record() if len(self.mixture) > 1 else None
        frontier, self.params, self.mixture = self.frontier, params, params.mixture()
        self.load_mixture(record, frontier)
        self.passes.sources = self.mixture.sources

    def create(self, source: int | None = None) -> Group:
        """The next position of the stream, or of one of its sources, waiting."""
        source = self.mixture.next() if source is None else source
        assert source is not None
        self.passes.begin(self.mixture.drawn[source] // self.mixture.sources[source].rows, source, self.committed)
        return self.add(self.mixture.draw(source))

    def _group(self, at: int) -> Group:
        epoch, position, source = self.mixture.place(at)
        return Group(epoch, position, source=source)

    def add(self, at: int) -> Group:
        """A position of the stream that is not in the table: it waits, as if new."""
        group = self._group(at)
        self.passes.begin(group.epoch, group.source, self.committed)
        self.groups[group.id] = self._dirty[group.id] = group
        self._enter(group)
        return group

    def row_of(self, group: Group) -> tuple[int, int, int]:
        """Where the row of a group is in the data: pass, position and source."""
        return self.passes.row(*group.place)

    def first_without_order(self) -> Group | None:
        """A group to come of a pass whose order is not known; None: there is none."""
        coming = (group for state in (GroupState.WAITING, *OUTSTANDING) for group in self.in_state(state))
        return next((group for group in coming if not self.passes.knows(group.epoch, group.source)), None)

    def touch(self, group: Group) -> None:
        """A field of it changed that no index depends on."""
        self._dirty[group.id] = group

    def add_sample(self, group: Group, meta: SampleMeta) -> None:
        group.samples[meta.index] = meta
        self._dirty[group.id] = self._dirty_samples[group.id] = group

    def move(self, group: Group, state: GroupState, *, deadline: int | None = None) -> None:
        """To another state. All that belongs to a lease ends with it."""
        self._leave(group)
        group.state = state
        if deadline is not None:
            group.deadline = deadline
        if state is not GroupState.LEASED:
            if group.lease_id is not None:
                self.granted.discard(group.lease_id)
                self.ended.append(group.lease_id)
            group.lease_id = group.replica_id = group.request_id = None
            group.missed = 0
            self.suspects.discard(group.id)
        if state is GroupState.WAITING:
            self.suspect(group)
        self._enter(group)
        self._dirty[group.id] = group

    def _enter(self, group: Group) -> None:
        """Note a group in all indices of its state."""
        state, name = group.state, group.id
        self.by_state[state][name] = group
        if state is GroupState.LEASED:
            self.deadlines[group.deadline] += 1
            self.by_lease[group.lease_id or ""] = group
            self.by_replica.setdefault(group.replica_id or "", {})[name] = group
            self.leased_by_deadline.setdefault(group.deadline, {})[name] = group
        elif state is GroupState.READY:
            self.deadlines[group.deadline] += 1
            self.by_deadline.setdefault(group.deadline, {})[name] = group
        elif state is GroupState.WAITING:
            heapq.heappush(self._queue, group.place)

    def _leave(self, group: Group) -> None:
        """Take a group out of all indices of its state."""
        state, name = group.state, group.id
        del self.by_state[state][name]
        if state is GroupState.LEASED:
            self._uncount(group.deadline)
            if self.by_lease.get(group.lease_id or "") is group:
                del self.by_lease[group.lease_id or ""]
            _take(self.by_replica, group.replica_id or "", name)
            _take(self.leased_by_deadline, group.deadline, name)
        elif state is GroupState.READY:
            self._uncount(group.deadline)
            _take(self.by_deadline, group.deadline, name)

    def _uncount(self, deadline: int) -> None:
        if self.deadlines[deadline] > 1:
            self.deadlines[deadline] -= 1
        else:
            del self.deadlines[deadline]

    def first_waiting(self) -> Group | None:
        """The waiting group that comes first in the stream."""
        waiting = self.by_state[GroupState.WAITING]
        if not waiting:
            self._queue.clear()
            return None
        while (group := waiting.get(group_id(*self._queue[0]))) is None:
            heapq.heappop(self._queue)
        return group

    def hand_over(self, group: Group, replica_id: str) -> None:
        """The holder of a lease has a new id."""
        self._leave(group)
        group.replica_id = replica_id
        self._enter(group)
        self._dirty[group.id] = group

    def forget_all(self) -> None:
        """No group is known any more; their stored rows and payloads go."""
        for group in self.groups.values():
            self.discard_samples(group)
        self._removed.update(self.groups)
        self.groups, self._dirty, self._dirty_samples = {}, {}, {}
        self.by_state = {state: {} for state in GroupState}
        for index in (self.deadlines, self.by_lease, self.by_replica, self.by_deadline, self.leased_by_deadline):
            index.clear()
        self.suspects.clear()
        self._queue.clear()
        self.archive.clear()

    def compact(self) -> None:
        """Keep but the newest of the trained and of the dropped groups whole, and those with a payload."""
        keep = self.params.keep_recent
        room_left = keep - len(self.by_state[GroupState.TRAINED])
        for state, room in ((GroupState.DURABLE, room_left), (GroupState.TRAINED, keep), (GroupState.DROPPED, keep)):
            groups = self.by_state[state]
            for group in list(islice(groups.values(), max(0, len(groups) - max(0, room)))):
                if group.reason is not None:
                    self.archive.add_dropped(self.position_of(group), group.reason.value)
                elif group.payload_kept:
                    continue
                else:
                    assert group.step is not None
                    self.archive.add_trained(self.position_of(group), group.step, staleness_of(group))
                self._remove(group)

    def _remove(self, group: Group) -> None:
        self._leave(group)
        del self.groups[group.id]
        self._dirty.pop(group.id, None)
        self._dirty_samples.pop(group.id, None)
        self._removed.add(group.id)

    def position_of(self, group: Group) -> int:
        """Its position in the stream."""
        return self.mixture.at(*group.place)

    def abandon_step(self) -> int:
        """The trainers of an assembled step are gone: its groups are ready again, and none waits for stragglers."""
        self.waiting_since = None
        batch = list(self.in_state(GroupState.BATCHED))
        for group in batch:
            group.step = None
            self.move(group, GroupState.READY)
        return len(batch)

    def requeue(self, group: Group) -> None:
        self.move(group, GroupState.WAITING)

    def fail(self, group: Group, reason: DropReason) -> None:
        """An attempt failed: it waits for another one, or is dropped after the last."""
        group.failures += 1
        if group.failures >= self.params.max_attempts:
            self.drop(group, reason)
        else:
            self.requeue(group)

    def crashed(self, group: Group, alone: bool) -> None:
        """The holder crashed. What it held with others is not to blame: only a group that was alone is dropped."""
        group.crashes += 1
        if alone and group.crashes >= self.params.max_attempts:
            group.error = f"{group.crashes} replicas crashed while they held it, the last one held nothing else"
            self.drop(group, DropReason.POISON)
        else:
            self.requeue(group)

    def suspect(self, group: Group) -> None:
        """Note a group whose next crash would be the last attempt: it is leased alone, so that none is wronged."""
        if group.crashes >= max(1, self.params.max_attempts - 1):
            self.suspects.add(group.id)

    def drop(self, group: Group, reason: DropReason) -> None:
        """Its position is not trained in this epoch."""
        self.discard_samples(group)
        self.filtered += reason is DropReason.ZERO_VARIANCE
        self.mixture.dropped[group.source] += 1
        self.fruitless[group.source] += reason in _FRUITLESS
        group.reason = reason
        self.move(group, GroupState.DROPPED)
        self._dropped.append(group)

    def undrop(self, source: int) -> None:
        """A group of this source was not dropped after all."""
        self.mixture.dropped[source] = max(0, self.mixture.dropped[source] - 1)

    def put_samples(self, group: Group, samples: dict[int, SampleMeta]) -> None:
        """Replace its samples."""
        group.samples = samples
        self._dirty[group.id] = self._dirty_samples[group.id] = group

    def discard_sample(self, group: Group, index: int) -> None:
        """One sample is made again."""
        part = group.samples.pop(index).part
        if group.payload_kept and part not in group.parts():
            self._dropped_payloads.append((group.id, part))
        self._dirty[group.id] = self._dirty_samples[group.id] = group

    def discard_samples(self, group: Group) -> None:
        """All of them, and their payloads."""
        if group.samples:
            if group.payload_kept:
                self._dropped_payloads += [(group.id, part) for part in group.parts()]
            self.put_samples(group, {})
        group.payload_kept = True

    def drop_payloads(self, group: Group) -> None:
        """The bytes may go, what the ledger knows of the samples stays."""
        if group.payload_kept:
            group.payload_kept = False
            self._dropped_payloads += [(group.id, part) for part in group.parts()]
            self._dirty[group.id] = group


def staleness_of(group: Group) -> Counter[int]:
    """The samples of a trained group by staleness."""
    assert group.step is not None
    return Counter(
        group.step - meta.oldest_version(group.step)
        for meta in group.samples.values()
        if meta.usable and not meta.baseline
    )


def _take(index: dict[Any, dict[str, Group]], key: Any, name: str) -> None:
    """Remove an entry, and its key with the last one."""
    entries = index[key]
    del entries[name]
    if not entries:
        del index[key]
