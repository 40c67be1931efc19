"""What this machine has, found without importing torch: cores, GPUs, installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NVIDIA_SMI_TIMEOUT = 20.0
"""Seconds: the first call after boot loads the driver, which takes up to ten on a large machine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What placement needs to know. `gpus` are values for CUDA_VISIBLE_DEVICES."""

    cores: int
    gpus: tuple[str, ...] = ()
    unused_gpus: int = 0
    """GPUs that are there but that the installed torch cannot use."""


def find_machine(env: Mapping[str, str]) -> Machine:
    """Look around. CUDA_VISIBLE_DEVICES in `env` limits the GPUs as usual."""
    gpus = visible_gpus(_count_gpus(), env.get("CUDA_VISIBLE_DEVICES"))
    usable = torch_has_cuda()
    return Machine(count_cores(), gpus if usable else (), 0 if usable else len(gpus))


def visible_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """GPUs that this job may use: all, or those of CUDA_VISIBLE_DEVICES (CUDA stops at the first wrong one)."""
    if visible is None:
        return tuple(str(i) for i in range(count))
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        is_index = name.isdigit() and int(name) < count
        if not (is_index or name.startswith(("GPU-", "MIG-"))) or count == 0:
            break
        chosen.append(name)
    return tuple(chosen)


def _count_gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            listed = subprocess.run(
                [tool, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT, check=True
            )
            return len(re.findall(r"^GPU \d+:", listed.stdout, re.MULTILINE))
        except (OSError, subprocess.SubprocessError):
            pass  # the device files below tell the same
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def torch_has_cuda() -> bool:
    """Whether the installed torch is a build for GPUs, told by its version (`2.13.0+cpu` is not)."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def has_module(name: str) -> bool:
    """Whether a top-level module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def count_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
