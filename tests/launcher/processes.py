"""Real processes for the launcher's tests: small scripts, and looks at what is alive."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

PYTHON = (sys.executable, "-I", "-S", "-c")
"""Starts in 15 ms."""

PATIENCE = 20.0
"""Seconds that a test waits for something that takes milliseconds on an idle machine."""

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
pid = os.fork()
if pid == 0:
    os.setsid()
    time.sleep(600)
open({ready!r}, 'w').write(f"{{os.getpid()}} {{pid}}")
{then}
"""


def alive(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(check: Callable[[], bool], what: str) -> None:
    """Wait for something; fail by name if it never comes."""
    give_up = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.01)


def pids(ready: Path) -> list[int]:
    """The ids that a script wrote once it was ready."""
    eventually(lambda: ready.exists() and ready.read_text() != "", f"{ready.name} written")
    return [int(part) for part in ready.read_text().split()]
