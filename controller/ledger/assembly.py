"""Assembly of a step: which ready groups train next, and whether the step must wait.

Step t takes the B ready groups with the nearest deadlines, provided that what remains (leased and ready) is
schedulable at t + 1. Nearest deadlines first is the best choice: exchanging a chosen group for a later one can
only make the rest tighter. If even this choice leaves the rest unschedulable, some unready group of the
tightest prefix has to be in this step, so the step waits for exactly those groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from controller.ledger.admission import tightest_prefix
from controller.ledger.group import Group, GroupState
from schema.wire.batch import StepTable
from schema.wire.sample import MOST_REWARDS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Assembled:
    """The groups of a step, ordered by deadline, then by position."""

    step: int
    groups: list[Group]
    surplus: list[Group] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WaitingStep:
    """Why the step cannot start; `stragglers` are the leased groups that it waits for in particular."""

    reason: str
    stragglers: list[Group] = field(default_factory=list)


def order(group: Group) -> tuple[int, tuple[int, int, int]]:
    return group.deadline, group.place


def choose(
    step: int,
    ready: Mapping[int, Mapping[str, Group]],
    leased: Mapping[int, Mapping[str, Group]],
    groups_per_step: int,
    *,
    more_to_come: bool,
    drop_surplus: bool = False,
) -> Assembled | WaitingStep:
    """Pick the batch of `step`, a pure function of what is outstanding.

    Args:
        ready: groups by deadline; with `leased` they are schedulable at `step`.
        leased: groups that are being made, by deadline: a trainer that waits asks again at each sample.
        more_to_come: whether groups that are not outstanding yet can still be leased.
        drop_surplus: with oversampling: groups left over that are due now are surplus; no step waits for them.
    """
    n_ready = sum(map(len, ready.values()))
    if n_ready < groups_per_step and (more_to_come or leased):
        return WaitingStep(f"step {step} has {n_ready} of {groups_per_step} groups ready", _due(leased, step))
    if not n_ready:
        return WaitingStep(f"step {step}: no data left")
    if not drop_surplus:
        tight = tightest_prefix(_rest(ready, leased, groups_per_step), step + 1, groups_per_step)
        if tight is not None:
            late = _due(leased, tight)
            names = ", ".join(group.id for group in late[:5])
            return WaitingStep(f"step {step} waits for {len(late)} groups due by step {tight}: {names}", late)
    chosen: list[Group] = []
    surplus: list[Group] = []
    for deadline in sorted(ready):
        if len(chosen) == groups_per_step and not (drop_surplus and deadline <= step):
            break
        candidates = sorted(ready[deadline].values(), key=order)
        room = groups_per_step - len(chosen)
        chosen += candidates[:room]
        surplus += candidates[room:] if deadline <= step else []
    if drop_surplus:
        return Assembled(step, chosen, [*surplus, *_due(leased, step)])
    return Assembled(step, chosen)


def _due(leased: Mapping[int, Mapping[str, Group]], step: int) -> list[Group]:
    """Groups that no later step may train, in order."""
    due = (group for deadline, groups in leased.items() if deadline <= step for group in groups.values())
    return sorted(due, key=order)


def _rest(
    ready: Mapping[int, Mapping[str, Group]], leased: Mapping[int, Mapping[str, Group]], groups_per_step: int
) -> Counter[int]:
    """Deadlines that remain when the nearest ones of the ready groups are taken."""
    remaining = Counter({deadline: len(groups) for deadline, groups in leased.items()})
    take = groups_per_step
    for deadline in sorted(ready):
        count = len(ready[deadline])
        taken = min(take, count)
        take -= taken
        if count > taken:
            remaining[deadline] += count - taken
    return remaining


PayloadRef = tuple[tuple[str, str], int, int]
"""Group id and part, and where the sample begins and ends in it."""


def places(groups: Sequence[Group]) -> list[PayloadRef]:
    """Where the payload of each row of the table of these groups is."""
    return [
        ((group.id, meta.part), meta.offset, meta.offset + meta.n_bytes)
        for group in groups
        for _, meta in sorted(group.samples.items())
    ]


def build_table(step: int, timeline: int, policy_epoch: int, groups: Sequence[Group]) -> StepTable:
    """The table of a step's batch: one row per sample, by group and then by index.

    A sample that cannot be trained (failed reward, too long) stays in the table with a null score, so that
    it is visible and never trained; a greedy one is marked as its group's baseline. Names of rewards are those of
    the configuration's functions; should a broken replica invent others, a batch has MOST_REWARDS columns all the
    same.
    """
    assert all(group.state in (GroupState.READY, GroupState.BATCHED) for group in groups)
    rows = [(g, meta) for g, group in enumerate(groups) for _, meta in sorted(group.samples.items())]
    headers = [meta.header for _, meta in rows]
    names = sorted({name for header in headers for name in header.rewards})[:MOST_REWARDS]
    return StepTable(
        step=step,
        timeline=timeline,
        policy_epoch=policy_epoch,
        group_ids=[group.id for group in groups],
        group=[g for g, _ in rows],
        index=[header.index for header in headers],
        score=[header.score if meta.usable else None for (_, meta), header in zip(rows, headers, strict=True)],
        rewards={name: [header.rewards.get(name) for header in headers] for name in names},
        prompt_tokens=[header.prompt_tokens for header in headers],
        response_tokens=[header.response_tokens for header in headers],
        total_tokens=[header.total_tokens for header in headers],
        oldest_version=[header.oldest_version for header in headers],
        newest_version=[header.newest_version for header in headers],
        finish_reason=[header.finish_reason for header in headers],
        baseline=_if_any([header.baseline for header in headers]),
        source=_if_any([header.source for header in headers]),
    )


def _if_any(column: list[T]) -> list[T]:
    """A column, or an empty one if it says nothing."""
    return column if any(column) else []
