"""The launcher's own records, for others to read: `launcher.json` and `logs/launcher.log`.

`launcher.json` holds the state of its processes, for `cosmos-launch status`, also when it is dead. It is replaced
as a whole whenever something in it has changed, and every few seconds as a sign of life; so a reader never sees half
of it, and the time in it says when a killed launcher was last alive. No secrets. `launcher.log` has the events of the
screen in a file like those of the processes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.processes.supervisor import Exit, Supervised
from launcher.restarts import EXIT_OK, Role
from schema.util.atomic_file import write_text
from schema.util.host import count_cores
from schema.util.text import indented

SIGN_OF_LIFE = 10.0
MOST_ENDS = 20
"""Ends of processes that are remembered: the newest are the ones that explain anything."""
MOST_LINES = 5


@dataclass(frozen=True, slots=True)
class LoggedEnd:
    """A process that ended before the job did. `at` is Unix time."""

    at: float
    process: str
    code: int
    what: str
    log: str
    lines: list[str]


@dataclass(slots=True)
class LauncherLog:
    """The content of launcher.json, and the log of events. Times are Unix seconds.

    path: launcher.json. log: launcher.log.
    """

    path: Path
    log: Path
    started_at: float = field(default_factory=time.time)
    ends: deque[LoggedEnd] = field(default_factory=lambda: deque(maxlen=MOST_ENDS))
    ending: str = ""
    """Why the launcher is ending the job; empty as long as it is not."""
    redis: str = ""
    """The fault of Redis (`launcher.job.redis_pulse`); empty: none."""
    _written: str = ""
    _at: float = 0.0

    def append(self, text: str) -> None:
        """Add an event to launcher.log. Raises OSError."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {indented(text)}\n")

    def ended(self, exit_: Exit) -> None:
        """Remember a process that went down; the data's preparation is meant to."""
        if exit_.replica.role is Role.DATA and exit_.code == EXIT_OK:
            return
        lines = list(exit_.lines[-MOST_LINES:])
        reason = exit_.how if exit_.code != EXIT_OK else "in order"
        self.ends.append(LoggedEnd(time.time(), exit_.process, exit_.code, reason, str(exit_.log_file), lines))

    def write(self, stage: str, replicas: Iterable[Supervised]) -> None:
        """Write the file if something has changed, or if it is time for a sign of life."""
        content = self._content(stage, replicas)
        text, now = json.dumps(content), time.time()
        if text == self._written and now - self._at < SIGN_OF_LIFE:
            return
        write_text(self.path, json.dumps({**content, "seen_at": now}, indent=2) + "\n")
        self._written, self._at = text, now

    def _content(self, stage: str, replicas: Iterable[Supervised]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "cores": count_cores(),
            "started_at": self.started_at,
            "stage": stage,
            "ending": self.ending,
            "redis": self.redis,
            "processes": {kept.replica.name: _process(kept) for kept in replicas},
            "ends": [asdict(end) for end in self.ends],
        }


def _process(kept: Supervised) -> dict[str, Any]:
    restarts = kept.restarts
    return {
        "role": str(kept.replica.role),
        "state": kept.state,
        "restarts": restarts.total,
        "in_a_row": restarts.in_a_row(time.monotonic()) if kept.state == "up" else restarts.streak,
        "limit": restarts.budget.max_restarts,
    }
