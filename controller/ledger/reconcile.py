"""This module decides what to do about a trainer that knows more of the history of the job than the store: decisions
as pure functions.

A store that comes back is a prefix of history: the controller's last writes may be missing, any number of them. A
trainer does not forget what it has trained: its weights contain it. So where the two differ, the trainer is right
about the past, and the controller about who may speak:

    history     epoch 1, timeline 0: 0 1 2 3 4 5 6 7│          (a number is a committed step)
                epoch 2, timeline 1:           4 5 6│7 8  ◀── this trainer's weights; its timeline began at 4
    store       epoch 1, timeline 0: 0 1 2 3 4 5│             ◀── what came back

Four facts make this decidable. Each registration of a trainer gets a *policy epoch* that is later than all others
that were ever handed out, those forgotten too (it contains the time). A *timeline* begins by going back to a
checkpoint, and only with a registration, so timelines and epochs rise together along history. A trainer knows where
its timeline *began*. And every step is identified by the batch that was trained in it, which the trainer can replay.

Claim: after `decide` and the replay that it asks for, the committed steps of the ledger are the steps contained in
the weights of the trainer with the highest epoch that has declared itself, each with the groups trained in it.

    epoch below the store's       the store remembers a later trainer: this one was replaced, and is refused (c)
    same timeline                 the store's C steps are the first C of this timeline: replay from C
    a later timeline, begun at    the store's timeline is one that was left, and it has all steps up to the
    or below C, and the store's   beginning, since all timelines between began there or later (`Lineage.since`): go
    is `since` or later           back there, replay from there. (Timelines that begin at 0 have no steps before it.)
    otherwise, or the trainer     its newest checkpoint says all about the steps before it: take the ledger from
    cannot replay from there      that, replay from there

So positions whose training the store forgot become trained, at their step; positions whose lease, push or batch it
forgot are waiting again and are made again with the same seeds; a drop that it forgot is decided again. No
position is trained twice, since only the trainer of the highest epoch gets batches, and it gets none before the
ledger has what it trained.

What remains of leases and ready groups has the deadlines of the past; `overdue` says which cannot be met any more.
They are made again: nothing is trained beyond the bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from schema.wire.messages import ErrorCode

MOST_BEGINNINGS = 64
"""Timelines whose beginnings a lineage keeps: each is a death after a checkpoint of its own."""


@dataclass(frozen=True, slots=True)
class Known:
    """It holds what the store came back with."""

    policy_epoch: int
    timeline: int
    committed: int


@dataclass(frozen=True, slots=True)
class Claim:
    """It holds what a trainer says of itself (see `schema.wire.messages.recovery.DeclareRequest`)."""

    policy_epoch: int
    timeline: int
    began: int
    """Step at which its timeline began."""
    first: int
    """The oldest step that it can replay."""
    steps: int
    snapshot_step: int | None = None
    snapshot_timeline: int = 0
    since: int | None = None
    """The oldest timeline with the steps with which its timeline began; None: it does not say, the one before."""


@dataclass(frozen=True, slots=True)
class Refuse:
    code: ErrorCode
    reason: str


@dataclass(frozen=True, slots=True)
class ResendSteps:
    """The trainer replays from `step` on; `back_to`: first go back there, a forgotten timeline began."""

    step: int
    back_to: int | None = None


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """The ledger begins anew from the claim's snapshot."""

    step: int


@dataclass(frozen=True, slots=True)
class NeedSnapshot:
    """Steps are missing that cannot be replayed: the newest checkpoint must provide them."""

    missing: int


Decision = Refuse | ResendSteps | FromSnapshot | NeedSnapshot


def decide(known: Known, claim: Claim) -> Decision:
    """See the module's docstring."""
    fault = _contradiction(known, claim)
    if fault is not None:
        return fault
    common = _common_steps(known, claim)
    if claim.first <= common:
        return ResendSteps(common, None if claim.timeline == known.timeline else common)
    if claim.snapshot_step is None:
        return NeedSnapshot(common)
    if not claim.first <= claim.snapshot_step <= claim.steps or claim.snapshot_timeline > claim.timeline:
        return Refuse(
            ErrorCode.CONFLICT,
            f"the store lost the steps from {common} on; this trainer can replay from {claim.first} on, and its "
            f"newest checkpoint covers {claim.snapshot_step}: it must start again from that checkpoint",
        )
    return FromSnapshot(claim.snapshot_step)


def _contradiction(known: Known, claim: Claim) -> Refuse | None:
    if claim.policy_epoch < known.policy_epoch:
        return Refuse(
            ErrorCode.STALE_EPOCH,
            f"policy epoch {claim.policy_epoch} has ended, the current one is {known.policy_epoch}: another trainer "
            f"has registered since, and this one must end",
        )
    if claim.timeline < known.timeline:
        return Refuse(
            ErrorCode.CONFLICT,
            f"the job is on timeline {known.timeline}, this trainer on {claim.timeline}: what it trained since "
            f"is not part of the job",
        )
    if not claim.first <= claim.steps or claim.began > claim.steps:
        return Refuse(
            ErrorCode.BAD_REQUEST,
            f"a trainer of {claim.steps} steps cannot replay from {claim.first} on, on a timeline begun at "
            f"{claim.began}",
        )
    if claim.timeline == known.timeline and known.committed > claim.steps:
        return Refuse(
            ErrorCode.CONFLICT,
            f"{known.committed} steps are committed, the weights of this trainer contain {claim.steps}: it must "
            f"start again",
        )
    return None


def _common_steps(known: Known, claim: Claim) -> int:
    """How many of the store's steps are certainly part of the trainer's history, and end where it can go on."""
    if claim.timeline == known.timeline:
        return known.committed
    since = claim.timeline - 1 if claim.since is None else claim.since
    if since <= known.timeline and claim.began <= known.committed:
        return claim.began
    return 0


class Lineage:
    """Which checkpoints the steps of a ledger contain, and so where a new trainer can start without a snapshot.

    Claim: a checkpoint of timeline T at step c is contained iff every later timeline began at or after c. Going back
    to step b keeps the first b steps and replaces all others. So where each later timeline began at b >= c, the first
    c steps are still those of T; where one began at b < c, its step b replaced that of T.

    So the minimum over the timelines after T decides, and of the pairs (timeline, began) only those matter that are
    below all later ones: a stack in which both numbers rise strictly. A timeline that begins at b removes all pairs
    with began >= b: for each T before such a pair the new pair is a minimum as low. The first pair after T then holds
    the minimum over all timelines after T. At most `MOST_BEGINNINGS` pairs are kept; of the two oldest the later
    timeline is kept with the lower step, which can only deny a checkpoint, never invent one.

    A ledger that began from a snapshot knows nothing below its step, the `floor`, and no timeline before its own
    (`first`) but that of the snapshot (`source`): the numbers between are of timelines that it was not made of.
    """

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = [(0, 0)]
        self.floor = self.source = self.first = 0

    def begin(self, timeline: int, step: int) -> None:
        """A timeline begins by going back to `step` of the one before."""
        while self.begun and self.begun[-1][1] >= step:
            self.begun.pop()
        self.begun.append((timeline, step))
        if len(self.begun) > MOST_BEGINNINGS:
            self.begun[:2] = [(self.begun[1][0], self.begun[0][1])]
        self.floor = min(self.floor, step)

    def begin_from(self, source: int, floor: int, timeline: int, began: int) -> None:
        """The ledger begins anew, from a snapshot of timeline `source` after `floor` steps."""
        self.begun, self.floor, self.source, self.first = [(timeline, began)], floor, source, timeline

    def contains(self, step: int, timeline: int | None, committed: int) -> bool:
        """Whether the checkpoint after `step` steps is contained. timeline: None: the present one."""
        if step == 0:  # the initial weights are the same in all
            return True
        if not self.floor <= step <= committed:
            return False
        present = self.begun[-1][0]
        timeline = present if timeline is None else timeline
        if timeline > present or (timeline < self.first and timeline != self.source):
            return False
        return step <= next((began for later, began in self.begun if later > timeline), step)

    @property
    def since(self) -> int:
        """The oldest timeline T such that all from T on contain the steps with which the present one began."""
        if len(self.begun) > 1:
            return self.begun[-2][0]
        adjacent = self.source == self.first - 1 and self.floor == self.begun[-1][1]
        return self.source if adjacent else self.first

    def to_record(self) -> dict[str, Any]:
        return {"begun": list(self.begun), "floor": self.floor, "source": self.source, "first": self.first}

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """From a stored header; of one without a lineage the present timeline and the one before are known."""
        lineage, timeline = cls(), header["timeline"]
        record = header.get("lineage")
        if record is not None:
            lineage.begun = [(number, began) for number, began in record["begun"]]
            lineage.floor, lineage.source, lineage.first = record["floor"], record["source"], record["first"]
        elif timeline:
            lineage.begun = [(timeline, header["began"])]
            lineage.source, lineage.first = timeline - 1, timeline
        return lineage


def overdue(jobs: Sequence[tuple[int, int]], first_step: int, slots: int) -> list[int]:
    """Which of (deadline, worth) to give up so that the others are schedulable from `first_step` on, `slots` each.

    Those of least worth in sum: sets that are schedulable form a matroid, so the greedy choice is the best one.
    Returns indices into `jobs`.
    """
    kept: list[tuple[int, int]] = []
    given_up: list[int] = []
    for index in sorted(range(len(jobs)), key=lambda i: jobs[i][0]):
        deadline, worth = jobs[index]
        heapq.heappush(kept, (worth, index))
        if len(kept) > slots * max(0, deadline - first_step + 1):
            given_up.append(heapq.heappop(kept)[1])
    return given_up
