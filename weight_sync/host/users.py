"""The users of a host copy: its directory lives as long as a process has it open, and what the dead left is swept.

    <parent>/cosmos-weights-<uid>/<job>-<run>-<host>/      one copy; <run> is a digest of the run directory's path,
                                                           <host> of what the running kernel drew when it started

Containers of one kernel share a copy. Hosts never do, also where the parent lies on a file system of several: locks
of one host may mean nothing to another. So nothing that bears the mark of another host is touched or swept.

Each process holds `users.lock` shared. Who can have it exclusively is alone: the first one, which believes nothing
that it finds until it has hashed it; the last one, which removes everything; or a process of another job, which
removes what is not in use.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from secrets import token_hex

from schema.util.file_lock import open_lock, release, try_lock
from schema.util.host import boot_id
from weight_sync.host.files import (
    ADVANCING,
    STATE,
    USERS,
    CacheError,
    own_directory,
    read_advancing,
    read_state,
    write_model,
)
from weight_sync.host.locks import LOOK_S, LockTimeoutError, holders
from weight_sync.layout import digest

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (a directory of our own below it is checked)
ROOM = 2
"""Copies that must fit into shared memory: a new one is written next to the old one."""
JOIN_S = 60.0
_TRASH = ".trash-"


def copy_directory(host_cache: str, *, job_id: str, run_dir: str, n_bytes: int) -> Path:
    """Return the directory of this host's copy for a job; make its parent, and remove what other jobs left here.

    host_cache: `weight_sync.host_cache`. run_dir: tells runs apart that have the same job id. n_bytes: of the
    weights.

    Raises `CacheError`: the directory cannot be used."""
    host = _host()
    name = f"{re.sub(r'[^A-Za-z0-9_-]', '-', job_id)[:64]}-{digest(run_dir.encode()).hex()[:12]}-{host}"
    base = f"cosmos-weights-{os.geteuid()}"
    parents = [Path(host_cache)] if host_cache else [SHARED_MEMORY, Path(tempfile.gettempdir())]
    # All replicas of the host must choose the same directory, also those that start when the space is taken.
    existing = [parent for parent in parents if (parent / base / name).is_dir()]
    parent = existing[0] if existing else next((p for p in parents[:-1] if _fits(p, n_bytes)), parents[-1])
    try:
        own_directory(parent / base)
        _sweep(parent / base, name, host)
    except OSError as error:
        raise CacheError(
            f"the host copy of the weights cannot lie in {parent}: {error.strerror}. Set weight_sync.host_cache to "
            f"a directory that exists on this host and that user {os.geteuid()} can write"
        ) from error
    return parent / base / name


def join(directory: Path) -> int:
    """Take a share in a copy; the descriptor is for `leave`.

    Raises `CacheError`: the directory is not this user's own, or cannot be made."""
    give_up = time.monotonic() + JOIN_S
    try:
        while True:
            own_directory(directory)
            users = _joined(directory)
            if users is not None:
                return users
            if time.monotonic() > give_up:
                raise LockTimeoutError(f"{directory} was not free in {JOIN_S:g} s: {holders(directory / USERS)}")
            time.sleep(LOOK_S)
    except OSError as error:
        raise CacheError(f"the host copy of the weights cannot lie in {directory}: {error}") from error


def stay(directory: Path, users: int) -> int | None:
    """None while the share is good. Where somebody has removed the directory (shared memory and temporary files are
    tidied up when their user has logged out, or after days), it is made anew: the descriptor of the new share.

    Raises as `join`."""
    if _is_lock_of(directory, users):
        return None
    log.warning("%s was removed: it is made anew", directory)
    try:
        own_directory(directory.parent)
    except OSError as error:
        raise CacheError(f"the host copy of the weights cannot lie in {directory}: {error}") from error
    anew = join(directory)
    release(users)
    return anew


def leave(directory: Path, users: int) -> None:
    """Give the share back; the last process removes the directory."""
    if try_lock(users, exclusive=True) and _is_lock_of(directory, users):
        _remove(directory)
    release(users)


def _joined(directory: Path) -> int | None:
    """One try; None when the directory was taken away meanwhile, or another process checks whether it is in use."""
    try:
        users = open_lock(directory / USERS)
    except FileNotFoundError:
        return None
    try:
        if try_lock(users, exclusive=True) and _is_lock_of(directory, users):
            _disown(directory)
        # From exclusive to shared the lock is given up for a moment.
        if try_lock(users, exclusive=False) and _is_lock_of(directory, users):
            return users
    except OSError:
        release(users)
        raise
    release(users)
    return None


def _disown(directory: Path) -> None:
    """Take out what was true for the processes before: ids of publications count from the beginning in another life
    of the job, and what happened to the bytes is unknown."""
    state = read_state(directory)
    if state is None:
        return
    torn = read_advancing(directory, state)
    if torn is not None:
        write_model(directory / ADVANCING, torn.model_copy(update={"publication": None}))
    write_model(directory / STATE, state.model_copy(update={"proven": False, "publication": None}))


def _is_lock_of(directory: Path, users: int) -> bool:
    """Whether an open lock file is still the one of that name: others may have removed the directory."""
    try:
        return os.path.samestat(os.fstat(users), (directory / USERS).lstat())
    except FileNotFoundError:
        return False


def _remove(directory: Path) -> None:
    """Away under its name at once; who holds its lock is alone."""
    trash = directory.with_name(f"{_TRASH}{token_hex(8)}")
    directory.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _host() -> str:
    """Another one for each start of a kernel; the same for all where the system has none to tell."""
    return digest(boot_id().encode()).hex()[:8]


def _sweep(base: Path, own_name: str, host: str) -> None:
    """Remove what other jobs left on this host and no process uses."""
    for path in base.iterdir():
        if path.name.startswith(_TRASH):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != own_name and path.name.endswith(f"-{host}") and path.is_dir() and not path.is_symlink():
            try:
                users = open_lock(path / USERS)
            except OSError:  # removed meanwhile
                continue
            if try_lock(users, exclusive=True) and _is_lock_of(path, users):
                log.info("removing the weights that another job left in %s", path)
                _remove(path)
            release(users)


def _fits(parent: Path, n_bytes: int) -> bool:
    try:
        return os.access(parent, os.W_OK) and shutil.disk_usage(parent).free >= ROOM * n_bytes
    except OSError:
        return False
