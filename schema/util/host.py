"""The machine that this process runs on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

PROC = Path("/proc")


@cache
def boot_id() -> str:
    """Differs after each start of the kernel; "" where the system has none (not Linux)."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
