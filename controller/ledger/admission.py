"""Admission: which leases may be granted so that no sample is ever trained beyond the staleness bound.

Let t = committed steps (step t is the next to be trained), B = groups per step, S = `allowed_outdated_steps`.
A group leased at weight version v has the *deadline* d = v + S: the last step that may train it. When its
samples arrive, d becomes (oldest token version) + S, which can only be later, since tokens are never older than
the version at the lease.

Let J be the multiset of deadlines of all leased and ready groups, and b the first step that still has free
slots: b = t, or b = t + 1 once the batch of step t has been assembled. J is *schedulable at b* iff no deadline
lies before b and

    for every u >= b:   #{ d in J : d <= u }  <=  B * (u - b + 1)

Earliest-deadline-first is optimal for unit jobs with B slots per step, so this is exact: J is schedulable iff
some assignment of groups to steps trains every one of them in time.

Invariant: J is schedulable at b. By induction over everything that can happen:

    lease       granted only if J with the new deadline stays schedulable (`Admission.decide`).
    push        raises a deadline: every count above can only fall.
    drop, expiry, release, loss of a replica: remove a deadline: likewise.
    assemble    takes at most B groups out of J, only if the rest is schedulable at b + 1 (`assembly`).
    commit      t rises by one; b stays, and J too.
    abandon     the batch of step t returns to J and b falls from t + 1 to t. Its groups, at most B with
                deadlines >= t, fit into the slots of step t; the others fit into the slots from t + 1 on.
    rewind      to checkpoint c <= t: of the groups that return, those that had been trained held distinct slots
                in steps c … t - 1 not later than their deadlines; all others fit into the slots from t on.

A batch for step t is taken from a J that is schedulable at t, hence all its deadlines are >= t: nothing is
trained later than its oldest token version + S. Taking u = t + S (no version is above t) also shows that at most
(S + 1) * B groups are leased, ready or batched at any time.

`oversample` > 1 widens the slots to floor(B * oversample) for admission only; groups that are due when their
step is full are then dropped as `surplus` at assembly, so the bound holds all the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from controller.ledger.values import LeaseRefusal, LedgerParams

LAG_WINDOW = 64
"""Groups over which the typical lease-to-ready time is taken: about a step or two of a usual batch."""


def tightest_prefix(
    deadlines: Mapping[int, int], first_step: int, slots: int, extra: int | None = None
) -> int | None:
    """The smallest u at which the deadlines are not schedulable from `first_step` on, or None if they are.

    Args:
        deadlines: how many groups have each deadline.
        first_step: b, the first step with free slots.
        slots: groups per step.
        extra: the deadline of one group more.
    """
    total, before = 0, first_step - 1
    ordered = sorted(deadlines) if extra is None or extra in deadlines else sorted([*deadlines, extra])
    for deadline in ordered:  # between two deadlines the left side is constant, the right side grows
        count = deadlines.get(deadline, 0) + (deadline == extra)
        total += count
        if count and (total > slots * (deadline - before) or deadline <= before):
            return deadline
    return None


class Lag:
    """Typical time from lease to ready, in steps: the median over the last groups."""

    def __init__(self) -> None:
        self._lags: deque[int] = deque(maxlen=LAG_WINDOW)
        self._typical: int | None = 0

    def observe(self, steps: int) -> None:
        self._lags.append(max(steps, 0))
        self._typical = None

    def typical(self) -> int:
        if self._typical is None:
            self._typical = median_low(self._lags)
        return self._typical


@dataclass(frozen=True, slots=True)
class Admission:
    """The facts that a decision depends on; `decide` is a pure function of them."""

    params: LedgerParams
    committed: int
    first_step: int
    deadlines: Counter[int]
    lag: int
    published_version: int

    def effective_lag(self) -> int:
        """g: how many steps ahead a deadline must lie, so that the trainer does not wait for a laggard.

        0 when nothing else could fill the next step, and never so large that the newest published version
        itself would be refused (inside a sync interval that version may be several steps old).
        """
        if self.deadlines.total() < self.params.groups_per_step:
            return 0
        newest_slack = self.params.deadline(self.published_version) - self.committed
        return max(0, min(self.lag, self.params.staleness_bound, newest_slack))

    def decide(self, version: int) -> LeaseRefusal | None:
        """None if a group whose oldest tokens are of this weight version may be leased now."""
        params, newest = self.params, self.published_version
        deadline, outdated = params.deadline(version), version < newest
        needed = max(self.first_step, self.committed + self.effective_lag())
        if deadline < needed:
            wait = f"wait for version {needed - params.staleness_bound}"
            remedy = f"load version {newest}" if outdated else wait
            return LeaseRefusal(
                f"samples of version {version} may be trained up to step {deadline}, "
                f"but only step {needed} and later can still be reached: {remedy}",
                update=outdated,
            )
        full = tightest_prefix(self.deadlines, self.first_step, params.slots, deadline)
        if full is None:
            return None
        newer, first, slots = params.deadline(newest), self.first_step, params.slots
        return LeaseRefusal(
            f"{self.deadlines.total()} groups are outstanding, and all slots up to step {full} are taken "
            f"(allowed_outdated_steps = {params.staleness_bound}, {params.groups_per_step} groups per step)",
            update=outdated and tightest_prefix(self.deadlines, first, slots, newer) is None,
        )
