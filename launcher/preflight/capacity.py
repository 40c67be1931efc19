"""How much memory this machine has, without importing torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.plan.machine import NVIDIA_SMI_TIMEOUT


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes. gpus: by the name that CUDA_VISIBLE_DEVICES gives them; missing where it cannot be told."""

    host_total: int
    host_free: int
    gpus: Mapping[str, int] = field(default_factory=dict)


def find_capacity(gpus: tuple[str, ...]) -> Capacity:
    """Look around."""
    total, free = host_memory(
        Path("/proc/meminfo"),
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
    )
    return Capacity(total, free, _gpu_memory() if gpus else {})


def host_memory(meminfo: Path, limit: Path, used: Path) -> tuple[int, int]:
    """Total and free bytes of this process's control group, or of the machine if that is less; 0 if unknown."""
    try:
        found = re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return 0, 0
    sizes = {name: int(number) * 1024 for name, number in found}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    try:
        most, now = int(limit.read_text()), int(used.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return total, free
    return min(total, most), min(free, max(0, most - now))


def _gpu_memory() -> dict[str, int]:
    """Bytes by index and by UUID."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        listed = subprocess.run(
            [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpus(listed.stdout)


def parse_gpus(text: str) -> dict[str, int]:
    """`0, GPU-…, 81559` (mebibytes) -> bytes by index and by UUID."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 3 and fields[2].isdigit():
            found[fields[0]] = found[fields[1]] = int(fields[2]) * 2**20
    return found
