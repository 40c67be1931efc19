"""An NVTX tool that notes the ranges of processes (`nvtx_tool.c`, compiled here), and what it has noted.

environment = attached(directory)        for processes to start with
noted(directory)                         {process id: its events}
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("nvtx_tool.c")


def attached(directory: Path) -> dict[str, str]:
    """The variables with which processes load the tool. Fails without gcc."""
    directory.mkdir(exist_ok=True)
    library = directory / "tool.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return {"NVTX_INJECTION64_PATH": str(library), "NVTX_NAMES": str(directory / "names")}


@dataclass
class Noted:
    """The ranges of one process."""

    nested: set[tuple[str, ...]] = field(default_factory=set)
    """Of threads: each range with those around it, the outermost first."""
    counts: dict[str, int] = field(default_factory=dict)
    """Of processes: how many of each name were begun."""
    left: list[str] = field(default_factory=list)
    """What was begun and not ended."""


def noted(directory: Path) -> dict[int, Noted]:
    """What each process has done, by its id; ends belong to what they end."""
    return {int(path.suffix[1:]): _read(path) for path in directory.glob("names.*")}


def _read(path: Path) -> Noted:
    found, threads, ranges = Noted(), dict[str, list[str]](), dict[str, str]()
    for line in path.read_text().splitlines():
        name, number = line[1:].split(" ")
        open_ = threads.setdefault(number, [])
        if line[0] == "+":
            open_.append(name)
            found.nested.add(tuple(open_))
        elif line[0] == "-":
            assert open_.pop() == name
        elif line[0] == "(":
            ranges[number] = name
            found.counts[name] = found.counts.get(name, 0) + 1
        else:
            del ranges[number]
    found.left = [*ranges.values(), *(name for open_ in threads.values() for name in open_)]
    return found
