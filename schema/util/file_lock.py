"""`flock` on files, between the processes of one host (and of others, where the file system passes locks on).

A lock belongs to an open file: threads of one process exclude each other as processes do, and the kernel releases the
locks of a process that dies. Nothing here waits: a blocked `flock` could neither time out nor be stopped.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def open_lock(path: Path, *, shared: bool = False) -> int:
    """Open a lock file, made where it is missing. Raises `OSError`; a symbolic link is one.

    shared: among users: one that another has made can be locked without being written.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644 if shared else 0o600)
    except PermissionError:
        if not shared:
            raise
        return os.open(path, os.O_RDONLY | _FLAGS)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Take the lock of an open file if that is possible at once. Raises `OSError` where files cannot be locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(descriptor: int) -> None:
    """Release and close. Explicitly, since a forked child would keep the lock of a file that is only closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
