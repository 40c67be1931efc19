"""The newest checkpoint of a run, by the names in its directory: none of its content is read.

A checkpoint is written under a temporary name and renamed to `step-<committed steps>` when it is complete; `latest`
names the one that training would go on from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    """Committed steps that it contains."""


def newest_checkpoint(checkpoints: Path) -> Checkpoint | None:
    """The checkpoint that `latest` names; where that cannot be read, the one of the most steps."""
    complete = {
        path.name: Checkpoint(path, int(match[1]))
        for path in checkpoints.glob("step-*")
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    }
    try:
        named = (checkpoints / "latest").read_text().strip()
    except (OSError, ValueError):
        named = ""
    return complete.get(named) or max(complete.values(), key=lambda checkpoint: checkpoint.step, default=None)
