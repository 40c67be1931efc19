"""What all benchmarks share: options, alternatives that take turns, medians and ratios, and the report at the end.

    given = options(__doc__, rounds=3, steps=(60, "steps of each run"))      --rounds, --steps, --threads, --json
    turns = in_turns({"plain": plain, "ours": ours}, given.rounds)           plain, ours, plain, ours, …
    report(given, {"ratio": ratio(turns["plain"], turns["ours"])}, rows)

A report is a table in Markdown, the command, date and machine that a figure of docs/performance.md needs, and in its
last line one JSON object. The standard library alone is imported here, and torch only asked where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart"
RANKS_TIMEOUT = 900.0
"""Seconds that all ranks of one measurement may take."""
Figures = dict[str, Any]
T = TypeVar("T")


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring of a benchmark as it is, and the default of each option."""


def options(doc: str | None, rounds: int | None = None, threads: int = 1, **named: Any) -> argparse.Namespace:
    """Parse the command line of a benchmark.

    rounds: turns of each alternative, after those that warm up; None: it has no rounds. threads: of torch.
    named: further options with their default, or (default, help). A type in place of a default is that of an option
    which has none; a list is written with commas; False is a switch; () is given once for each value.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    if rounds is not None:
        named = {"rounds": (rounds, "turns of each alternative"), **named}
    named |= {"threads": (threads, "of torch"), "json": (Path, "write the last line there, too")}
    for name, given in named.items():
        default, text = given if isinstance(given, tuple) else (given, "")
        how: dict[str, Any] = {"default": default, "type": type(default)}
        if isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, type):
            how = {"type": default}
        elif default == ():
            how = {"action": "append", "default": []}
        elif isinstance(default, list):
            item = type(default[0])
            how["type"] = lambda line, item=item: [item(part) for part in line.split(",")]
        parser.add_argument(f"--{name.replace('_', '-')}", help=text or " ", **how)
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and temporary files go
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(parsed.threads)
    return parsed


# ---- measuring ----------------------------------------------------------------------------------------------------


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> dict[str, list[T]]:
    """Let alternatives take turns, so that whatever else the machine does hits all.

    Returns what each of them returned, round by round, without the rounds that warm up.
    """
    taken: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(1 - warm_up, rounds + 1):
        for name, way in ways.items():
            result = way()
            if number > 0:
                taken[name].append(result)
            say(f"round {number}, {name}: {_rounded(result)}" if number > 0 else f"warmed up: {name}")
    return taken


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by the clock or (`time.process_time`) of this process on a core."""
    began = clock()
    work()
    return clock() - began


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each figure over rounds."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Median over rounds of one alternative's figure over the other's of the same round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def on_ranks(n: int, module: str, *arguments: str, **environment: str) -> Any:
    """Run a module as `n` ranks, by torchrun; the JSON in the last line that one of them printed.

    Raises `CalledProcessError` where a rank fails, and `TimeoutExpired`.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n),
        "-m",
        module,
    ]
    with subprocess.Popen(
        [*command, *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as ranks:
        try:
            printed, _ = ranks.communicate(timeout=RANKS_TIMEOUT)
        finally:
            ranks.terminate()  # torchrun ends its ranks then
    if ranks.returncode:
        raise subprocess.CalledProcessError(ranks.returncode, command)
    return json.loads(printed.splitlines()[-1])


def resident_mib(name: str = "VmRSS") -> float:
    """MiB of this process: `VmRSS` now, or `VmHWM`, the most since the last `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    """Begin anew with `VmHWM`."""
    Path("/proc/self/clear_refs").write_text("5")


# ---- reporting ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print progress to standard error, apart from the report."""
    print(text, file=sys.stderr, flush=True)


def report(
    parsed: argparse.Namespace, figures: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Print the table of the rows, and the figures with where they are from as one line of JSON."""
    where = machine()
    if rows:
        print(table(rows), end="\n\n")
    print(f"`{where['command']}`, {where['date']}, {where['gpu'] or where['cpu']}, {where['cores']} cores")
    line = json.dumps({**_rounded(figures), "machine": where})
    if parsed.json is not None:
        parsed.json.write_text(line + "\n")
    print(line)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a line for each row, a column for each figure that one of them has."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    return table_of(["", *columns], [[name, *map(row.get, columns)] for name, row in rows.items()])


def table_of(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown of these cells."""
    lines = [head, *(list(map(cell, row)) for row in rows)]
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|---" * len(head) + "|", *others])


def cell(value: object) -> str:
    """A figure in four digits, or the first line of a text."""
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value).partition("\n")[0]
    return text.replace("|", "\\|")


def machine() -> dict[str, Any]:
    """What a figure needs: command, date, card, processor, cores, versions."""
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    spec, models = sys.modules["__main__"].__spec__, Path("/proc/cpuinfo").read_text().splitlines()
    module = spec.name if spec is not None else sys.argv[0]
    return {
        "command": "python -m " + shlex.join([module, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch is not None and on_gpu else None,
        "cpu": next(
            (line.partition(": ")[2] for line in models if line.startswith("model name")), platform.machine()
        ),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", None),
    }


def _rounded(value: Any) -> Any:
    """Four digits of every float in it."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
