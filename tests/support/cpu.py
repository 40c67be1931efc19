"""CPU seconds of each test file: user and system, of the test process and of all processes that its tests started.

`COSMOS_TEST_CPU` names the file that every process of a test run writes a line to for each test. `measured` sets it
and adds up: `python -m tests.counts --cpu` prints what it finds.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "COSMOS_TEST_CPU"


@contextmanager
def spent(name: str) -> Iterator[None]:
    """Note what the block costs under a name, where the environment names a file for it.

    A process counts once it was waited for, as `time` has it: one that outlives its test counts with a later one.
    """
    path = os.environ.get(VARIABLE)
    before = _seconds()
    yield
    if path:
        with Path(path).open("a", encoding="utf-8") as out:
            out.write(f"{_seconds() - before:.3f}\t{name}\n")


def _seconds() -> float:
    return sum(os.times()[:4])


def measured(*command: str) -> tuple[int, float, Counter[str]]:
    """Run a command to its end: its exit code, its CPU seconds with all children, and those by test file."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "cpu"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = subprocess.run(command, env={**os.environ, VARIABLE: str(lines)}, check=False).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        by_file: Counter[str] = Counter()
        for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
            seconds, _, test = line.partition("\t")
            by_file[test.partition("::")[0]] += float(seconds)  # type: ignore[assignment]
    total = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return code, total, by_file
