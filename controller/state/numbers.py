"""Numbers that others key messages and files by, and that a store which lost history must not give out twice. Pure.

A controller that starts on an existing job cannot know which numbers its predecessors gave out in history that is
lost. So the numbers that it gives out begin above all that can have been:

    known ─┬─ given out, and lost ─┐           first
           └───────── LEAP ────────┴───────────▶ or the date in milliseconds, whichever is higher

The date separates what several controllers gave out, also where the lost history contains the start of one of them.
The leap does where the clock was set back between the loss and the restart.
"""

from __future__ import annotations

LEAP = 1 << 20
"""More numbers of one kind than the history that is lost at once can hold."""


def first_number(known: int, wall: float) -> int:
    """The first number that a controller gives out on an existing job.

    known: the highest one in the store. wall: Unix time at which the controller started.
    """
    return max(known + LEAP, int(wall * 1000))
