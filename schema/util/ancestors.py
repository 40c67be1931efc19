"""Whether the process that started this one still lives, through whatever stands in between (a profiler)."""

from __future__ import annotations

import os
from pathlib import Path

LOOKS = 3
"""A chain in which a process ends while it is read is read again."""


def descends_from(pid: int) -> bool:
    """Whether a process is the parent of this one, or above it. Without /proc only the parent is seen.

    Above all is the first process, to which orphans go: it counts as a parent alone.
    """
    return os.getppid() == pid or any(_is_above(pid) for _ in range(LOOKS))


def _is_above(pid: int) -> bool:
    ancestor = os.getppid()
    while ancestor > 1:
        if ancestor == pid:
            return True
        try:
            fields = Path(f"/proc/{ancestor}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        ancestor = int(fields[1])
    return False
