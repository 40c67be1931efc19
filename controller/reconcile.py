"""What to do about a trainer that knows more of the history of the job than the store: decisions as pure functions.

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
    one timeline later, begun     the store's timeline is the one that was left, and it has all steps up to the
    at or below C                 beginning: go back there, replay from there. (Two or more timelines later the
                                  steps below the beginning may be of a timeline between: not enough is known,
                                  but for timelines that begin at 0.)
    otherwise, or the trainer     its newest checkpoint tells all about the steps before it: take the ledger from
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
from collections.abc import Sequence
from dataclasses import dataclass

from schema.wire.messages import ErrorCode


@dataclass(frozen=True, slots=True)
class Known:
    """What the store came back with."""

    policy_epoch: int
    timeline: int
    committed: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a trainer says of itself (see `schema.wire.history.DeclareRequest`)."""

    policy_epoch: int
    timeline: int
    began: int
    """Step at which its timeline began."""
    first: int
    """The oldest step that it can replay."""
    steps: int
    snapshot_step: int | None = None
    snapshot_timeline: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    code: ErrorCode
    reason: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The trainer replays from `step` on; `back_to`: first go back there, a forgotten timeline began."""

    step: int
    back_to: int | None = None


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """The ledger begins anew from the claim's snapshot."""

    step: int


@dataclass(frozen=True, slots=True)
class NeedSnapshot:
    """Steps are missing that cannot be replayed: the newest checkpoint must tell."""

    missing: int


Decision = Refuse | Replay | FromSnapshot | NeedSnapshot


def decide(known: Known, claim: Claim) -> Decision:
    """See the module's docstring."""
    fault = _contradiction(known, claim)
    if fault is not None:
        return fault
    common = _common_steps(known, claim)
    if claim.first <= common:
        return Replay(common, None if claim.timeline == known.timeline else common)
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
            f"the job is on timeline {known.timeline}, this trainer on {claim.timeline}: what it trained since is no "
            f"part of the job",
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
    if claim.timeline == known.timeline + 1 and claim.began <= known.committed:
        return claim.began
    return 0


def resumes_in(known: Known, began: int, step: int, snapshot_timeline: int | None) -> bool:
    """Whether the store's ledger contains the checkpoint after `step` steps that a new trainer starts from.

    If so the ledger goes back to it by itself; else it begins anew from the checkpoint's snapshot. `began`: where the
    store's timeline began. A checkpoint of a later timeline than the store knows, or of the timeline before after it
    was left, has other steps than the store, also where their numbers agree.
    """
    if step > known.committed:
        return False
    if snapshot_timeline is None or step == 0 or snapshot_timeline == known.timeline:
        return True
    return snapshot_timeline == known.timeline - 1 and step <= began


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
