"""Which processes of a run are alive: looks at lock files that disturb no process.

The launcher holds its lock alone (exclusively); the keepers of a role hold that role's together (shared). Whoever
only looks has to take a lock for a moment, too. A look at the launcher's is therefore a shared one, so that two who
look never take each other for a launcher; a look at a role's must be exclusive, and is repeated before it is
believed that somebody holds it. Keepers try again for longer than any look takes.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from launcher.errors import LaunchError
from schema.util.file_lock import try_lock

LOOKS, BETWEEN_LOOKS = 4, 0.01
"""A look takes microseconds: one that met another is over at the next."""


def held_alone(path: Path) -> bool:
    """Whether a lock is held exclusively. Raises LaunchError if that cannot be found out."""
    return not _can_take(path, exclusive=False)


def held_by_any(path: Path) -> bool:
    """Whether a lock is held, shared or not. Raises LaunchError if that cannot be found out."""
    for look in range(LOOKS):
        if look:
            time.sleep(BETWEEN_LOOKS)
        if _can_take(path, exclusive=True):
            return False
    return True


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open, as the one that holds its lock must. Raises OSError where it is another
    user's, which the system does not let us see, or one of the two is gone."""
    target = path.stat()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed just now, or of a file system that does not answer
            opened = os.stat(f"/proc/{pid}/fd/{name}")
            if (opened.st_dev, opened.st_ino) == (target.st_dev, target.st_ino):
                return True
    return False


def _can_take(path: Path, *, exclusive: bool) -> bool:
    handle = _open(path)
    if handle is None:
        return True
    try:
        return try_lock(handle, exclusive=exclusive)
    except OSError as error:
        raise _unseen(path, error) from None
    finally:
        os.close(handle)


def _open(path: Path) -> int | None:
    """The file, to be written to where that is allowed (NFS asks for it); None if there is none."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            fault = error
    raise _unseen(path, fault)


def _unseen(path: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"whether the run in {path.parent.parent} is alive cannot be determined: {path}: {error.strerror}",
        "ask as the user who started it, or ask its controller: COSMOS_TOKEN=… cosmos-launch status URL",
    )
