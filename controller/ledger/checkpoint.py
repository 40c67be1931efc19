"""Checkpoints and the way back to them: what becomes durable, and what a rewind makes of each group.

A checkpoint after c steps contains their weights. Going back to it, a group that was trained since, or waits to
be, is ready again if its payload is kept and every token is of a version that the checkpoint contains; all others
are generated again. A job also resumes from a checkpoint alone, with an empty store: `LedgerSnapshot` says which
positions of the stream it leaves untrained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from controller.errors import ApiError
from controller.ledger.group import DONE, DropReason, Group, GroupState
from controller.ledger.group_table import GroupTable, staleness_of
from controller.ledger.pass_orders import PassOrders
from controller.ledger.reconcile import overdue
from controller.ledger.step_counter import why_other
from controller.ledger.values import LedgerParams, LedgerTotals, Stride
from schema.wire.messages import ErrorCode, LedgerSnapshot, MixtureProgress, StoredStride
from schema.wire.mixture import Mixture, OtherSourcesError

BEGINNING = LedgerSnapshot(committed_steps=0, timeline=0, frontier=0, untrained=[])
"""A checkpoint before the first step would store this: a ledger that began later goes back there with it."""


def make_durable(table: GroupTable, step: int) -> int:
    """A checkpoint that contains `step` committed steps is complete. Returns how many steps are durable."""
    table.require(step, "checkpoint")
    for group in list(table.in_state(GroupState.TRAINED)):
        if group.step is not None and group.step < step:
            table.drop_payloads(group)
            table.move(group, GroupState.DURABLE)
    table.durable = max(table.durable, step)
    table.compact()
    return table.durable


def snapshot(table: GroupTable, step: int) -> LedgerSnapshot:
    """Return what a checkpoint after `step` committed steps stores: enough to go on with an empty store."""
    table.require(step, "snapshot")
    since = table.archive.staleness_since(step)
    untrained = table.archive.trained_since(step)
    for group in table.groups.values():
        if group.state is GroupState.DROPPED:
            continue
        if group.state not in DONE:
            untrained.append(table.position_of(group))
        elif _trained_since(group, step):
            untrained.append(table.position_of(group))
            since.update(staleness_of(group))
    return LedgerSnapshot(
        committed_steps=step,
        timeline=table.timeline,
        frontier=table.frontier,
        untrained=sorted(untrained),
        dropped=table.status().dropped,
        staleness=table.totals.staleness - since,
        n_positions=table.params.n_positions,
        order=table.params.order or None,
        data=table.params.data or None,
        stride=StoredStride(**asdict(table.stride)),
        mixture=MixtureProgress(**table.mixture.to_record()) if len(table.mixture) > 1 else None,
        passes=table.passes.to_snapshot(step, _passes(table, untrained)),
    )


def _passes(table: GroupTable, untrained: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The source and pass of all groups that may be handed out again, or next."""
    for at in untrained:
        data_pass, _, source = table.mixture.place(at)
        yield source, data_pass
    yield from enumerate(_begun(table.mixture))


def _begun(mixture: Mixture) -> list[int]:
    """The pass of each source that its next group is of."""
    return [drawn // source.rows for source, drawn in zip(mixture.sources, mixture.drawn, strict=True)]


def rewind(table: GroupTable, step: int, timeline: int | None = None) -> None:
    """Go back to the checkpoint after `step` steps; a new timeline begins (its number, if it has one already).

    Groups trained since, or waiting to be, are ready again if their payload is kept and every token is of a
    version that the checkpoint contains; all others are generated again. Drops stay final. All leases end:
    their holders may have loaded weights meanwhile that the checkpoint does not contain.
    """
    table.require(step, "rewind")
    if step < table.lineage.floor:
        if step:
            detail = f"cannot rewind to step {step}: nothing is known below {table.lineage.floor}"
            raise ApiError(ErrorCode.CONFLICT, detail)
        return begin_from(table, BEGINNING, timeline)
    for group in list(table.groups.values()):
        since = _trained_since(group, step)
        if since:
            table.totals.staleness -= staleness_of(group)
        if since or group.state in (GroupState.READY, GroupState.BATCHED):
            _take_back(table, group, step)
        elif group.state is GroupState.LEASED:
            table.requeue(group)
        if group.state is GroupState.WAITING:
            for index, meta in list(group.samples.items()):
                if meta.newest > step:
                    table.discard_sample(group, index)
    positions, staleness = table.archive.rewind(step)
    for at in positions:  # trained since and not kept whole any more
        table.add(at)
    table.totals.staleness -= staleness
    table.go_back(step, timeline)
    table.closed, table.filtered = None, 0
    table.fruitless = [0] * len(table.mixture)
    table.stride = table.stride.at_most(step, table.used)
    give_up_overdue(table)


def go_on_changed(table: GroupTable, header: Mapping[str, Any]) -> None:
    """Go on with what a job left under another bound, or with groups of another number in a step.

    header: the stored one. Groups keep their place where they can still be trained in time, else they are made again.
    """
    params = table.params
    shift = params.staleness_bound - header.get("bound", params.staleness_bound)
    per_step = header.get("stride", {}).get("per_step", params.groups_per_step)
    if shift or per_step != params.groups_per_step:
        table.abandon_step()
    for state in (GroupState.LEASED, GroupState.READY):
        for group in list(table.in_state(state)) if shift else ():
            table.move(group, state, deadline=group.deadline + shift)
    give_up_overdue(table)
    if table.first_step < table.total_steps and (not table.exhausted or table.outstanding):
        table.closed = None  # further steps or passes are asked for


def give_up_overdue(table: GroupTable) -> None:
    """Make again what was leased or ready in the past and cannot be trained in time any more."""
    groups = [*table.in_state(GroupState.LEASED), *table.in_state(GroupState.READY)]
    jobs = [(group.deadline, len(group.samples) + (group.state is GroupState.READY)) for group in groups]
    for index in overdue(jobs, table.first_step, table.params.slots):
        table.discard_samples(groups[index])
        table.requeue(groups[index])


def _trained_since(group: Group, step: int) -> bool:
    return group.state in DONE and (group.step or 0) >= step


def _take_back(table: GroupTable, group: Group, step: int) -> None:
    reusable = group.payload_kept and group.newest_version() <= step and not table.misfits(group)
    deadline = table.params.deadline(group.oldest_version())
    group.step = None
    if reusable and deadline >= step:
        table.move(group, GroupState.READY, deadline=deadline)
    else:
        table.discard_samples(group)
        table.requeue(group)


def begin_from(
    table: GroupTable, snapshot: LedgerSnapshot, timeline: int | None = None, began: int | None = None
) -> None:
    """Go on from a checkpoint: what it left untrained waits, all that the table knew is forgotten.

    A new timeline begins, unless the caller says which one it is and where it began.

    Raises:
        ApiError: the snapshot cannot be of this job; nothing has changed.
    """
    check_snapshot(snapshot, table.params)
    if snapshot.passes is not None:
        table.passes.load(snapshot.passes)
    table.forget_all()
    table.go_on_from(snapshot, timeline, began)
    table.mixture = table.params.mixture()
    if snapshot.frontier:
        table.load_mixture(None if snapshot.mixture is None else snapshot.mixture.model_dump(), snapshot.frontier)
    table.closed, table.filtered = None, 0
    kept = Stride(**snapshot.stride.model_dump()) if snapshot.stride else Stride(table.params.groups_per_step)
    used = snapshot.frontier - len(snapshot.untrained)
    table.stride = kept.of(table.params.groups_per_step, snapshot.committed_steps, used)
    table.totals = LedgerTotals(
        staleness=Counter(snapshot.staleness),
        dropped_before=Counter(snapshot.dropped),
        trained_before=snapshot.frontier - len(snapshot.untrained) - sum(snapshot.dropped.values()),
    )
    for at in snapshot.untrained:
        table.add(at)


def check_snapshot(snapshot: LedgerSnapshot, params: LedgerParams) -> None:
    """Whether a snapshot can be of a job with these parameters.

    Raises:
        ApiError: it is of other data, or its numbers contradict each other; says which and what to do.
    """
    continues = snapshot.n_positions in params.grown and snapshot.frontier <= (snapshot.n_positions or 0)
    if snapshot.n_positions not in (None, params.n_positions) and not continues:
        raise _unusable(
            f"it was made with {snapshot.n_positions} prepared rows, this job has {params.n_positions}: positions "
            f"would be other prompts. Use the same data, or start from the checkpoint's exported weights "
            f"(policy.model_name_or_path) without resuming"
        )
    if snapshot.order is not None and params.order not in ("", snapshot.order):
        keys = "train.seed, dataloader_shuffle and the curriculum of train.train_policy"
        why = why_other(snapshot.order, params.order, keys)
        raise _unusable(
            f"its rows are in another order: {why}, else some prompts would be trained twice and others never"
        )
    mixture = params.mixture()
    _check_mixture(snapshot, mixture)
    _check_passes(snapshot, params, mixture)
    # Of several sources a ledger that had lost history may have handed out a few more.
    if len(mixture) == 1 and snapshot.frontier > mixture.limit:
        raise _unusable(
            f"{snapshot.frontier} positions were handed out, this job has {mixture.limit}: set train.epoch "
            f"and the data to what they were"
        )
    untrained = snapshot.untrained
    if any(a >= b for a, b in pairwise(untrained)) or any(mixture.undrawn(at) > 0 for at in untrained):
        raise _unusable(f"its untrained positions must rise and lie below its frontier {snapshot.frontier}")
    unknown = snapshot.dropped.keys() - set(DropReason)
    if unknown:
        raise _unusable(f"it counts drops by {min(unknown)[:40]!r}, which is not a reason to drop")
    if len(untrained) + sum(snapshot.dropped.values()) > snapshot.frontier:
        raise _unusable(
            f"{len(untrained)} untrained and {sum(snapshot.dropped.values())} dropped positions are more than the "
            f"{snapshot.frontier} that were handed out"
        )


def _check_passes(snapshot: LedgerSnapshot, params: LedgerParams, mixture: Mixture) -> None:
    """Whether the orders of later passes can be of this job. Raises `ApiError`."""
    if snapshot.passes is None:
        if params.by_results is not None and any(source for source in _begun(mixture)):
            raise _unusable("it says nothing of results, and later passes of its rows have begun")
        return
    try:
        PassOrders(params.by_results, mixture.sources).load(snapshot.passes)
    except ValueError as error:
        raise _unusable(f"{error}. Use the same data") from None


def _check_mixture(snapshot: LedgerSnapshot, mixture: Mixture) -> None:
    """Load what was drawn of each source. Raises `ApiError`: the snapshot is of other sources."""
    record = snapshot.mixture
    if record is None and len(mixture) == 1:
        mixture.drawn[0] = snapshot.frontier
        return
    if not snapshot.frontier:
        return
    try:
        if record is None or len(mixture) == 1:
            raise OtherSourcesError("of the two, one has parts with shares of their own and the other has none")
        mixture.load(record.model_dump())
    except OtherSourcesError as error:
        raise _unusable(f"{error}. Use the same parts, domains and data") from None
    if mixture.handed_out != snapshot.frontier:
        raise _unusable(f"its sources have {mixture.handed_out} positions, its frontier is {snapshot.frontier}")


def _unusable(why: str) -> ApiError:
    return ApiError(ErrorCode.CONFLICT, f"this job cannot go on from the checkpoint's ledger: {why}")
