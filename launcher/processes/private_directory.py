"""Directories that nobody else can enter: of sockets, and of tokens that machines share."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def make_private(path: Path) -> None:
    """Make a directory that its owner alone can enter, or see that it is one.

    Raises OSError where another user has it, or something else is there: in a directory such as /tmp anybody can
    take a name that was removed.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
        return
    except FileExistsError:
        pass
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(
                errno.EPERM, "it belongs to another user; remove it, or set TMPDIR to a place of your own", path
            )
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
