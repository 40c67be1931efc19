"""One step of a job, run by a command alone: a process to its end, in a temporary run directory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from launcher.errors import LaunchError

_OF_OURS = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: (.*)")
"""A line of a log. Others are what the user's own code has printed."""


def run_step(
    directory: Path,
    module: str,
    arguments: Sequence[str],
    limit: float,
    *,
    result: str = "",
    rewards: Sequence[str] = (),
    data: Collection[str] = (),
) -> list[str]:
    """Run a step; answers what it wrote to standard error. Raises LaunchError where it has no result.

    limit: in seconds. result: the file that says that it has ended, whatever its exit code; "": that is 0.
    rewards: variables of `reward.environment`. data: schemes of the addresses that data is read from.
    """
    import subprocess  # with the next two 100 ms that a command which runs no step need not spend

    from launcher.plan.credentials import base_environment, credentials_of
    from launcher.restarts import Role

    argv = [sys.executable, "-P", "-m", module, "--run-dir", str(directory), *arguments]
    try:
        ended = subprocess.run(
            argv,
            env=credentials_of(Role.DATA, base_environment(os.environ), rewards=rewards, data=data),
            stderr=subprocess.PIPE,
            timeout=limit,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{module} has not ended within {limit:g} s") from None
    stderr_lines = ended.stderr.splitlines()
    if not (directory / result).exists() if result else ended.returncode:
        logged = [match[1] for line in stderr_lines if (match := _OF_OURS.match(line))]
        raise LaunchError(logged[-1] if logged else "\n".join(stderr_lines[-20:]) or f"exit code {ended.returncode}")
    return stderr_lines


def not_logged(lines: Iterable[str]) -> list[str]:
    """The lines that are not of our logs."""
    return [line for line in lines if not _OF_OURS.match(line)]
