"""Workers under Nsight Systems (`profiler.enable_nsys`): the command in front of theirs, and where reports go."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from schema.config import Config, Problem

PROGRAM, KEY = "nsys", "profiler.enable_nsys"
OPTIONS = ("--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none", "--wait=primary", "--force-overwrite=false")
"""Calls and kernels, our ranges, and what the operating system is asked for; no samples of the CPU. `--wait=primary`:
the report follows the end of the worker, whatever that has left behind."""
REPORT_SECONDS = 120.0
"""For a report, after the worker has ended."""


def command(folder: Path, name: str) -> tuple[str, ...]:
    """Return what starts a process under Nsight Systems. Its report has a number that none before it has: nothing is
    overwritten by a restart."""
    reports = {path.name.split(".")[0] for path in folder.glob(f"nsys-{name}-*")}
    number = next(n for n in itertools.count(1) if f"nsys-{name}-{n}" not in reports)
    output = f"{folder}/nsys-{name}-{number}".replace("%", "%%")  # which it replaces by names of its own
    return (PROGRAM, "profile", *OPTIONS, f"--output={output}")


def report_seconds(config: Config) -> float:
    """For the report of a worker, where it has one."""
    return REPORT_SECONDS if config.profiler.enable_nsys else 0.0


def grace(config: Config) -> float:
    """Seconds that a worker may take to leave, its report included."""
    return config.launcher.shutdown_timeout + report_seconds(config)


def check_nsight(config: Config) -> list[Problem]:
    """Whether it is installed where it is asked for."""
    if not config.profiler.enable_nsys or shutil.which(PROGRAM) is not None:
        return []
    message = f"true runs the workers under Nsight Systems, and no program {PROGRAM} is on the PATH"
    hint = f"install its command line (the package nsight-systems-cli), or write {KEY} = false"
    return [Problem(KEY, message, True, hint)]
