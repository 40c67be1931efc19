"""The directory of checkpoints: hidden while written, renamed, pointed at; what the dead left behind is removed.

    mkdir .step-N.x, hold its lock ─▶ files ─▶ manifest ─▶ sync ─▶ rename to step-N ─▶ move `latest`

Whoever is killed between any two of these leaves all complete checkpoints as they were, but for one of the same step
and a timeline that was left, which makes room. The lock in a directory that is being written shows whether its writer
lives, since the system gives it back when its holders end: every rank holds it (shared), and who wants to clean up
asks for it alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import IO

from policy_worker.checkpoints.layout import LATEST, LOCK, TRASH, UNFINISHED, name_of
from schema.util.atomic_file import put_in_place, write_text
from schema.util.file_lock import try_lock

log = logging.getLogger(__name__)


def begin(directory: Path, step: int) -> Path:
    """A new directory next to the complete ones. Raises `OSError`."""
    unfinished = directory / f"{UNFINISHED}{step:08d}.{secrets.token_hex(4)}"
    unfinished.mkdir(parents=True)
    (unfinished / LOCK).touch()
    return unfinished


def hold(unfinished: Path) -> IO[bytes]:
    """Mark that this process writes there, as long as the stream is open. Raises `OSError`."""
    stream = (unfinished / LOCK).open("rb")
    try:
        try_lock(stream.fileno(), exclusive=False)
    except OSError as error:  # a file system without locks: what is left behind there stays
        log.debug("%s cannot be locked: %s", stream.name, error)
    return stream


def place(unfinished: Path, step: int) -> Path:
    """Give a complete checkpoint its name; one of this step from a timeline that was left makes room.

    Raises `OSError`: nothing was deleted."""
    directory = unfinished.parent
    target = directory / name_of(step)
    (unfinished / LOCK).unlink(missing_ok=True)
    put_in_place(unfinished, target, directory / f"{TRASH}{secrets.token_hex(4)}")
    return target


def point_at(target: Path) -> None:
    """Make `target` the newest."""
    write_text(target.with_name(LATEST), target.name, durable=True)


def remove(path: Path) -> None:
    """Delete a directory so that half of it is never visible. Raises `OSError` if it cannot be renamed."""
    trash = path.with_name(f"{TRASH}{secrets.token_hex(4)}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def clean(directory: Path) -> None:
    """Remove what processes left that are surely dead: half-written and half-deleted directories."""
    for path in directory.glob(f"{TRASH}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{UNFINISHED}*"):
        if _is_abandoned(path):
            log.warning("%s was never finished and its writer is gone: removed", path)
            shutil.rmtree(path, ignore_errors=True)
        else:
            log.warning("%s may still be written by another process: left alone", path)
    for path in [*directory.glob(f".{LATEST}.*"), *directory.glob(".best.json.*")]:
        path.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    try:
        stream = (path / LOCK).open("rb")
    except FileNotFoundError:  # killed right after mkdir, or right before the rename
        return True
    except OSError:
        return False
    with stream:
        try:
            return try_lock(stream.fileno(), exclusive=True)
        except OSError:
            return False


def check_writable(directory: Path) -> None:
    """Raises `OSError` naming a path, now rather than after the first steps."""
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / f".probe.{secrets.token_hex(4)}"
    try:
        probe.write_bytes(b"")
    finally:
        probe.unlink(missing_ok=True)
