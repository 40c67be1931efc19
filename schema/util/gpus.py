"""GPUs that the launcher dealt to a process: it computes on them or ends by name, never on the CPU instead.

PyTorch takes a GPU that cannot be opened (a driver that is too old, a container without the device's files) for one
that is not there. The launcher therefore writes into `COSMOS_DEALT_GPUS` how many a process has; a job that was
planned for the CPU has no such variable, and runs on a machine with GPUs all the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "COSMOS_DEALT_GPUS"
"""How many GPUs the launcher dealt to the process; not set where there are none."""

PART_VARIABLE = "COSMOS_GPU_PART"
"""The part of its GPU's memory that a process may take, where an engine has the rest; not set where none has."""

LEAST_LOGITS, MOST_LOGITS = 2**25, 2**28

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Which GPUs CUDA shows a process; empty: none."""

LEAST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""Major version of CUDA -> the oldest driver for Linux that runs it, by NVIDIA's release notes of CUDA."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")


class UnusableGpuError(Exception):
    """The process has GPUs and cannot use them; the message gives the reason, the driver and the one needed."""


def variable_for(gpus: int) -> dict[str, str]:
    """Return the variable of a process that is dealt so many GPUs, none for a process without."""
    return {VARIABLE: str(gpus)} if gpus else {}


def dealt_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """How many GPUs the launcher dealt to this process; 0: none, or it was not started by the launcher."""
    text = environment.get(VARIABLE, "")
    return int(text) if text.isdigit() else 0


def logits_at_once(memory: int) -> int:
    """How many logits the trainer has in memory at once on a GPU of so many bytes; 0: on a CPU, or unknown.

    In float32 they take a 128th of the memory, down to a power of two within bounds: the same on all GPUs of a kind,
    however full they are. The least is enough for products at full speed on a CPU, and small next to a model."""
    power = 1 << max(memory // 512, 1).bit_length() - 1
    return min(MOST_LOGITS, max(LEAST_LOGITS, power))


def part_of_gpu(environment: Mapping[str, str] = os.environ) -> float:
    """The part of its GPU's memory that this process may take; 1.0: all of it."""
    return float(environment.get(PART_VARIABLE) or 1.0)


def require_dealt_gpus(open_first: Callable[[], object], cuda: str | None) -> None:
    """Return if a GPU can be used, or none was dealt.

    open_first: raises where no GPU can be opened (`torch.cuda.init`). cuda: version that PyTorch was built for
    (`torch.version.cuda`).

    Raises `UnusableGpuError`.
    """
    if not (dealt := dealt_gpus()):
        return
    try:
        open_first()
    except Exception as error:  # PyTorch raises RuntimeError, AssertionError and DeferredCudaCallError
        raise UnusableGpuError(
            f"the launcher dealt {dealt} GPU{'s' * (dealt > 1)} to this process, and PyTorch cannot open one: "
            f"{reason(str(error), cuda)}"
        ) from error


def reason(error: str, cuda: str | None, driver: str | None = None) -> str:
    """Return why no GPU can be opened, in one line: PyTorch's own words, the driver that is there, the one needed.

    driver: its version; None: that of this machine.
    """
    first = (error.strip().splitlines() or ["no reason given"])[0].rstrip(".")
    if cuda is None:
        return f"{first} (it is built without CUDA)"
    installed, needed = driver or driver_version(), least_driver(cuda)
    state = f"the driver is {installed}" if installed else "the driver's version is unknown"
    return f"{first} ({state}, CUDA {cuda} needs {needed} or newer)" if needed else f"{first} ({state})"


def least_driver(cuda: str) -> str | None:
    """Return the oldest driver that runs this version of CUDA ("13.0" -> "580"); None where it is unknown."""
    major = cuda.partition(".")[0]
    return LEAST_DRIVERS.get(int(major)) if major.isdigit() else None


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Return the version of the NVIDIA driver that this machine's kernel has loaded; None: it has none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE)
    return match[1] if match else None
