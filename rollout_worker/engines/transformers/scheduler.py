"""Decisions of the embedded engine, as pure functions of numbers.

Admission.  A wave of new samples costs one forward for their prompts, so waves are worth collecting: unless all
that waits fits at once, none begins before REFILL of the slots are free. With short answers this is within a
tenth of static batches, with a long tail 1.25 times as fast (benchmarks/engine/admission.py).

Update.  New weights invalidate the cache. Either the running samples end first (none is admitted meanwhile), or
their cache is computed again. Rule: wait exactly while ending them takes at most PATIENCE times as long as
recomputing them, both estimated from measured speeds. Short answers thus never pay for a recomputation, and a
sample with thousands of tokens to go never delays an update by more than it would cost.

Alone.  Kernels sum in an order that depends on the shapes they are given, so the last bits of a log-prob depend on
who else is in the batch and on where its columns lie. Where the same bits are wanted whichever process was killed,
a request is decoded by itself: it begins when nothing runs, in an empty window, and updates wait for its end. Then
every shape is a function of prompt, seeds, settings and weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REFILL = 0.25
PATIENCE = 4.0
"""While waiting, rows still decode, fewer and fewer: about a quarter of the time is lost (measured)."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    slots: int
    """Samples decoded at once."""
    cache_tokens: int
    """Tokens that the cache may hold: rows times the length of the longest."""


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request in the queue: samples not begun yet, and the most tokens each of them can reach."""

    samples: int
    longest: int


def admit(
    waiting: Sequence[QueuedRequest],
    running: int,
    running_longest: int,
    capacity: CacheCapacity,
    refill: float = REFILL,
) -> list[int]:
    """How many samples of each waiting request begin now: a prefix of the queue, the last entry perhaps partly.

    An empty engine always begins at least one sample.
    """
    free = capacity.slots - running
    total = sum(entry.samples for entry in waiting)
    if running and total > free and free < refill * capacity.slots:
        return []
    granted: list[int] = []
    rows, longest = running, running_longest
    for entry in waiting:
        longest = max(longest, entry.longest)
        fitting = min(entry.samples, capacity.slots - rows, capacity.cache_tokens // longest - rows)
        if fitting <= 0 and rows == 0:
            fitting = 1
        if fitting <= 0:
            break
        granted.append(fitting)
        rows += fitting
        if fitting < entry.samples:
            break
    return granted


def admit_alone(waiting: Sequence[QueuedRequest], running: int, capacity: CacheCapacity) -> list[int]:
    """Admit as `admit` does, one request at a time: nothing while anything runs, then as much of the first as has
    slots."""
    return [min(waiting[0].samples, capacity.slots)] if waiting and not running else []


def let_running_end(
    steps_left: int, step_seconds: float, cached_tokens: int, token_seconds: float, patience: float = PATIENCE
) -> bool:
    """Whether an update waits for the running samples: see the module's docstring.

    steps_left: the most tokens that any running sample can still get. cached_tokens: what a recomputation would
    compute. The speeds are measured; 0 before the first measurement, which means: recompute.
    """
    return steps_left * step_seconds <= patience * cached_tokens * token_seconds


class SecondsPerUnit:
    """A running estimate of seconds per unit: an exponential mean that forgets half in about seven samples."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, seconds: float, units: int = 1) -> None:
        value = seconds / max(units, 1)
        self.seconds = value if self.seconds == 0.0 else self.seconds + 0.1 * (value - self.seconds)
