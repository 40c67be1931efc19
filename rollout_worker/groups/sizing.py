"""Decisions of the worker loop, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_GROUPS = 1024
"""Groups per lease request: an answer of a few megabytes at most."""
AHEAD = 0.25
"""Share of the capacity that may stand empty for the sake of fewer, larger lease requests."""
BACKLOG = 3
"""Samples held in all (generated, scored and not pushed yet, too) may be this many times the capacity: when
rewards or the controller cannot keep up, leasing more would only let it grow old here."""


def groups_to_lease(*, in_engine: int, held: int, capacity: int, group_size: int, batch_size: int) -> int:
    """How many groups to ask for now; 0: none.

    in_engine: samples in the engine, running or waiting. held: samples leased and not pushed. Asks for all that
    fits beside what the engine has, but not for less than `batch_size` groups at a time, unless that would let
    more than AHEAD of the engine run dry first. An empty engine always gets at least one group.
    """
    if held >= BACKLOG * max(capacity, group_size):
        return 0
    room = max(capacity - in_engine, 0) // group_size
    if in_engine == 0:
        room = max(room, 1)
    least = min(batch_size, max(int(AHEAD * capacity) // group_size, 1))
    return min(room, MAX_GROUPS) if room >= least else 0


def cut_batch(sizes: Sequence[int], max_bytes: int, max_items: int) -> int:
    """How many of the queued frames go into one request: at least one, no more than the limits allow."""
    total = 0
    for count, size in enumerate(sizes[:max_items]):
        total += size
        if total > max_bytes and count:
            return count
    return min(len(sizes), max_items)


@dataclass(frozen=True, slots=True)
class LeavingTimes:
    """How the time that a replica has for leaving is divided; seconds. What remains is for closing the engine."""

    finish: float
    """Running samples may go on so long."""
    push: float
    """Then what is finished is pushed."""
    goodbye: float
    """Then the controller is told, and takes back the rest."""


def leaving_times(shutdown_timeout: float) -> LeavingTimes:
    """Most of the time is for what cannot be had again; pushes take milliseconds where the controller answers."""
    return LeavingTimes(
        0.6 * shutdown_timeout, min(5.0, 0.15 * shutdown_timeout), min(5.0, 0.1 * shutdown_timeout)
    )
