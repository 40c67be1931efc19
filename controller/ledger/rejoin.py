"""The table takes this from others after its store has lost history: steps, a checkpoint's snapshot, leases.

`controller.ledger.reconcile` decides what is to be done and proves that it is right; here it is done to the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from pydantic import ValidationError

from controller.errors import ApiError
from controller.ledger.admission import tightest_prefix
from controller.ledger.checkpoint import give_up_overdue
from controller.ledger.group import DONE, Group, GroupState, SampleMeta, group_id, parse_group_id
from controller.ledger.group_table import GroupTable, staleness_of
from schema.wire.batch import StepTable
from schema.wire.messages import ErrorCode, HeldLease
from schema.wire.sample import SampleHeader

# ---- trainers ---------------------------------------------------------------------------------------------


def recommit(table: GroupTable, batch: StepTable) -> bool:
    """Commit the next step as its trainer says that it was trained, whatever state its groups are in here.

    Returns False if it was committed before.

    Raises:
        ApiError: not the next step, or a batch that cannot have been trained.
    """
    if batch.step < table.committed:
        return False
    if batch.step > table.committed:
        detail = f"step {batch.step} was replayed, but step {table.committed} is next"
        raise ApiError(ErrorCode.WRONG_STEP, detail)
    positions = _positions(table, batch)
    samples = _samples(table, batch)
    table.abandon_step()
    _hand_out(table, positions)
    for index, position in enumerate(positions):
        _train(table, _take(table, position), batch.step, samples.get(index, {}))
    table.committed += 1
    table.filtered = 0
    table.compact()
    give_up_overdue(table)
    return True


def _positions(table: GroupTable, batch: StepTable) -> list[int]:
    """Stream positions of the groups of a replayed batch, all of which may be trained."""
    most = table.params.groups_per_step
    if len(batch.group_ids) > most:
        raise _cannot_be(batch, f"it has {len(batch.group_ids)} groups, {most} at most")
    positions = [_position(table, name) for name in batch.group_ids]
    if len(set(positions)) != len(positions):
        raise _cannot_be(batch, "it names a group twice")
    forgotten = table.totals.dropped_before.total()
    for name, position in zip(batch.group_ids, positions, strict=True):
        group = table.groups.get(name)
        if group is None and table.mixture.undrawn(position) <= 0 and table.archive.reason_of(position) is None:
            forgotten -= 1  # dropped, by a checkpoint that does not say which were
            if forgotten < 0 or position in table.archive:
                raise _cannot_be(batch, f"group {name} was trained before")
        if group is not None and group.state in DONE:
            raise _cannot_be(batch, f"group {name} was trained in step {group.step}")
    return positions


def _samples(table: GroupTable, batch: StepTable) -> dict[int, dict[int, SampleMeta]]:
    """The samples of each group of a batch, by index of the group and of the sample."""
    params = table.params
    samples: dict[int, dict[int, SampleMeta]] = {}
    for group, rows in groupby(range(batch.n_samples), key=lambda row: batch.group[row]):
        for row in rows:
            meta = _sample(batch, row)
            oldest = meta.oldest_version(batch.step)
            if not 0 <= meta.index < params.group_size or meta.baseline != (meta.index == params.baseline):
                raise _cannot_be(batch, f"sample {meta.index} of {params.group_size}")
            if meta.usable and not oldest <= batch.step <= params.deadline(oldest):
                raise _cannot_be(batch, f"row {row} is {batch.step - oldest} steps old")
            samples.setdefault(group, {})[meta.index] = meta
    return samples


def _sample(batch: StepTable, row: int) -> SampleMeta:
    """Return what the ledger knew of a sample, from its row of a batch."""
    columns = (
        "index",
        "prompt_tokens",
        "response_tokens",
        "total_tokens",
        "oldest_version",
        "newest_version",
        "finish_reason",
        "score",
    )
    rewards = {name: value for name, column in batch.rewards.items() if (value := column[row]) is not None}
    fields = {name: getattr(batch, name)[row] for name in columns} | {"baseline": batch.is_baseline(row)}
    fields |= {"source": batch.source[row]} if batch.source else {}
    try:
        return SampleMeta.of(SampleHeader.model_validate({**fields, "rewards": rewards}), 0, "")
    except ValidationError as error:
        raise _cannot_be(batch, f"row {row}: {error.errors(include_url=False)[0]['msg']}") from None


def _train(table: GroupTable, group: Group, step: int, samples: dict[int, SampleMeta]) -> None:
    table.discard_samples(group)
    table.put_samples(group, samples)
    group.payload_kept = False
    group.reason, group.step = None, step
    table.totals.staleness.update(staleness_of(group))
    table.move(group, GroupState.TRAINED)


def _take(table: GroupTable, position: int) -> Group:
    """The group at a position, also if it was dropped and is not kept whole any more.

    A drop that the store forgot may be decided otherwise the second time, and then be known again from an older
    checkpoint: what the weights contain counts.
    """
    place = table.mixture.place(position)
    group = table.groups.get(group_id(*place))
    if group is not None:
        if group.state is GroupState.DROPPED:
            table.undrop(group.source)
        return group
    table.undrop(place[2])
    if position in table.archive:
        table.archive.forget_drop(position)
    else:
        ((reason, _),) = table.totals.dropped_before.most_common(1)
        table.totals.dropped_before[reason] -= 1
    return table.add(position)


def _hand_out(table: GroupTable, positions: Sequence[int]) -> None:
    """Create these positions, and those before them of the same source, if the table does not know of them: they
    wait.
    """
    for position in positions:
        for _ in range(table.mixture.undrawn(position)):
            table.create(position % len(table.mixture))


def _position(table: GroupTable, name: str) -> int:
    """The position in the stream of a group's id. Raises `ApiError` for one that does not exist."""
    place, params = parse_group_id(name), table.params
    at = None if place is None else table.mixture.find(*place)
    if at is None:
        raise ApiError(
            ErrorCode.BAD_REQUEST,
            f"{name[:80]!r} is not a group of {params.data_passes} epochs of {params.n_positions} positions",
        )
    return at


def _cannot_be(batch: StepTable, why: str) -> ApiError:
    return ApiError(ErrorCode.CONFLICT, f"step {batch.step} cannot have been trained as it is replayed: {why}")


def lost_payloads(table: GroupTable, names: Sequence[str]) -> None:
    """Payloads of these groups of the assembled step are gone: they are made again, the step is open again."""
    table.abandon_step()
    for name in names:
        group = table.groups[name]
        table.discard_samples(group)
        table.requeue(group)


# ---- rollout replicas -------------------------------------------------------------------------------------


def adopt(table: GroupTable, replica_id: str, held: Sequence[HeldLease], now: float) -> list[str]:
    """Leases that a replica says it holds: known ones are its own, forgotten ones too if that is possible.

    A forgotten lease is taken back if its group waits for a replica, all samples that the replica has pushed under
    it are here, and it can be trained in time. Replicas that ask for work are quicker than those that find out that
    their lease is forgotten, so a lease of the same group that was granted since, and under which nothing was pushed
    yet, gives way. Returns the ids of the others: that work is lost.
    """
    lost = []
    for lease in held:
        group = table.groups.get(lease.group_id)
        if group is None or group.state is not GroupState.LEASED or group.lease_id != lease.lease_id:
            later = None if group is None or not _gives_way(table, group, lease) else _pre_empted(table, group)
            group = _forgotten(table, lease)
            if group is None:
                if later is not None:
                    _granted_again(table, later)
                lost.append(lease.lease_id)
                continue
            group.lease_id, group.lease_version = lease.lease_id, lease.version
            group.lease_step = table.committed
            group.replica_id, group.request_id = replica_id, None
            group.attempt = max(group.attempt, 1)
            table.move(group, GroupState.LEASED, deadline=_deadline_of(table, group, lease.version))
        group.expires = now + table.params.lease_timeout
        table.hand_over(group, replica_id)
    return lost


def _gives_way(table: GroupTable, group: Group, lease: HeldLease) -> bool:
    """Whether the lease of a group was granted since history was lost, to redo what this lease is about."""
    granted = group.lease_id in table.granted and lease.lease_id not in table.ended
    return table.succeeds and granted and all(meta.lease_id != group.lease_id for meta in group.samples.values())


def _pre_empted(table: GroupTable, group: Group) -> Group:
    """End a lease. Returns a copy of the group as it was."""
    before = replace(group)
    table.requeue(group)
    return before


def _granted_again(table: GroupTable, before: Group) -> None:
    """Undo `_pre_empted`."""
    group = table.groups[before.id]
    group.lease_id, group.replica_id, group.request_id = before.lease_id, before.replica_id, before.request_id
    table.move(group, GroupState.LEASED, deadline=before.deadline)
    assert group.lease_id is not None
    table.granted.add(group.lease_id)
    table.ended.remove(group.lease_id)


def _forgotten(table: GroupTable, lease: HeldLease) -> Group | None:
    """The group of a lease that the table does not know, if it can be taken back."""
    params = table.params
    if lease.version < 0 or table.closed is not None or table.finished:
        return None
    try:
        position = _position(table, lease.group_id)
    except ApiError:
        return None
    undrawn = table.mixture.undrawn(position)
    if undrawn > (params.staleness_bound + 1) * params.slots:
        return None
    if undrawn > 0:
        if lease.pushed or not _fits(table, params.deadline(lease.version)):
            return None
        _hand_out(table, [position])
        return table.groups[lease.group_id]
    group = table.groups.get(lease.group_id)
    if group is None or group.state is not GroupState.WAITING or group.id in table.suspects:
        return None
    if not group.samples.keys() >= set(lease.pushed):
        return None
    return group if _fits(table, _deadline_of(table, group, lease.version)) else None


def _deadline_of(table: GroupTable, group: Group, version: int) -> int:
    oldest = min([version, *(meta.oldest_version(version) for meta in group.samples.values())])
    return table.params.deadline(oldest)


def _fits(table: GroupTable, deadline: int) -> bool:
    """Whether leased and ready groups stay schedulable with one more."""
    first = table.first_step
    return deadline >= first and tightest_prefix(table.deadlines, first, table.params.slots, deadline) is None
