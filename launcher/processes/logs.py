"""Reading the end of a process's log file."""

from __future__ import annotations

import re
from pathlib import Path

from schema.util.text import one_line

TAIL_LINES = 20
TAIL_BYTES = 64 * 1024
"""Enough for 20 lines of a traceback; a file of gigabytes is not read through."""

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def tail(path: Path, lines: int = TAIL_LINES, since: int = 0) -> list[str]:
    """The last lines of a log from byte `since` on, without terminal control codes; empty without a log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(min(since, size), size - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    # A progress bar rewrites its line: what was visible last is what counts.
    written = [_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n")]
    return [one_line(line) for line in written if line][-lines:]
