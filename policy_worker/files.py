"""Files and directories that are whole or not there: written beside, forced to disk, renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Raises `OSError`; then what was there is there."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_text(text)
        sync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of what is at `target` at the end of the block.

    Raises:
        OSError: what was there is there.
    """
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    beside.mkdir(parents=True)
    try:
        yield beside
        put_in_place(beside, target, beside.with_name(f"{beside.name}.old"))
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def remove_unfinished(target: Path) -> None:
    """Delete what processes that were killed in `written_beside` have left. Only where no other one is at it."""
    for path in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(path, ignore_errors=True)


def put_in_place(beside: Path, target: Path, old: Path) -> None:
    """Give a finished directory its name, once it is on disk; what has that name makes room and is deleted.

    old: where that stands for a moment; all three lie in one directory.

    Raises:
        OSError: what was there is there.
    """
    sync_tree(beside)
    replaces = os.path.lexists(target)
    if replaces:
        os.rename(target, old)
    try:
        os.rename(beside, target)
    except OSError:
        if replaces:
            os.rename(old, target)
        raise
    sync(target.parent)
    if replaces and old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    elif replaces:
        old.unlink(missing_ok=True)


def sync_tree(directory: Path) -> None:
    """Force all files and directories below to disk. Raises `OSError`."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Force a file or directory to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
