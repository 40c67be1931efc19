"""Proof that a checkpoint is what was written: every file there, of its size, with its hash.

Reading all of it takes as long as the disk does, so the ranks share the files. Small faults show first: sizes are
compared before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from policy_worker.checkpoints.layout import FileFacts, hash_of_file


def share_of(files: Mapping[str, FileFacts], rank: int, world: int) -> list[str]:
    """The files that this rank verifies: together all, each once, about as many bytes each."""
    by_size = sorted(files, key=lambda name: (-files[name].bytes, name))
    return by_size[rank::world]


def faults(directory: Path, files: Mapping[str, FileFacts], names: list[str] | None = None) -> list[str]:
    """What is wrong with these files (None: all) of a checkpoint, each with its path."""
    chosen = list(files) if names is None else names
    return [fault for name in chosen if (fault := _fault(directory / name, files[name])) is not None]


def _fault(path: Path, written: FileFacts) -> str | None:
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"{path} has {size} bytes, written were {written.bytes}"
        if hash_of_file(path).hash != written.hash:
            return f"{path} was altered: it does not have the hash of what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None
