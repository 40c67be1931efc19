"""Real processes for the launcher's tests: small scripts, and looks at what is alive."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.waiting import until

PYTHON = (sys.executable, "-I", "-S", "-c")
"""Starts in 15 ms."""

ON_TERM = """
import signal, sys, time
def leave(*_):
    {body}
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open({ready!r}, 'w').write(str(__import__('os').getpid()))
time.sleep(600)
"""

STUBBORN = """
import signal, time, os
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({ready!r}, 'w').write(str(os.getpid()))
time.sleep(600)
"""

WITH_GRANDCHILD = """
import os, sys, time
has_left, leaves = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    os.write(leaves, b".")
    time.sleep(600)
os.read(has_left, 1)
open({ready!r}, 'w').write(f"{{os.getpid()}} {{pid}}")
{then}
"""


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_gone(pids: list[int]) -> None:
    """Wait for the end of processes."""
    until(lambda: not any(alive(pid) for pid in pids), f"the end of {pids}")


def pids(ready: Path) -> list[int]:
    """The ids that a script wrote once it was ready."""
    until(lambda: ready.exists() and ready.read_text() != "", f"{ready.name} written")
    return [int(part) for part in ready.read_text().split()]
