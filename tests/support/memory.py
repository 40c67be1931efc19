"""The memory that a program takes."""

from __future__ import annotations

import re
import subprocess
import sys


def peak_bytes(code: str) -> int:
    """The most memory that a Python program has had; the program must end well."""
    # Not ru_maxrss, which a process inherits from the one that has started it.
    report = "\nprint(open('/proc/self/status').read())"
    ended = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", ended.stdout)[-1])
