"""Locks between the processes of one host: `flock` on a file, with an end to every wait.

A lock belongs to an open file, so threads of one process exclude each other as processes do, and the kernel
releases the locks of whoever dies. Waiting is looking again and again: a blocked `flock` could
neither time out nor be stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from schema.config.secrets import masked
from schema.util.file_lock import open_lock, release, try_lock
from weight_sync.errors import StoppedError, WeightError

LOOK_S = 0.01


class LockTimeoutError(WeightError):
    """A lock was not had in time; the message names who holds it."""


@contextmanager
def locked(path: Path, *, exclusive: bool, timeout: float, stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock of a file.

    timeout: seconds to wait for it. stop: set from another thread, ends the wait.

    Raises `LockTimeoutError`: others hold it, named as far as the kernel tells. `StoppedError`: `stop` was set;
    `OSError`: the file cannot be opened."""
    descriptor = open_lock(path)
    try:
        give_up = time.monotonic() + timeout
        while not try_lock(descriptor, exclusive=exclusive):
            if stop is not None and stop.is_set():
                raise StoppedError(f"no longer waiting for {path}: this process ends")
            if time.monotonic() > give_up:
                raise LockTimeoutError(f"{path} was not free within {timeout:g} s: {holders(path)}")
            time.sleep(LOOK_S)
        yield
    finally:
        release(descriptor)


def holders(path: Path) -> str:
    """Name the holders of a file's lock, in words."""
    try:
        inode = path.stat().st_ino
        with open("/proc/locks", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return "the system does not report which process holds it"
    # "1: FLOCK  ADVISORY  READ 4711 00:1b:4 0 EOF", and "1: -> FLOCK …" of a waiting process
    pids = {row[4] for row in rows if row[1] == "FLOCK" and row[5].rsplit(":", 1)[-1] == str(inode)}
    if not pids:
        return "the system does not report which process holds it"
    return "held by " + ", ".join(_described(pid) for pid in sorted(pids))


def _described(pid: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({' '.join(_shown(command.split()))[:100]})"


def _shown(words: Iterable[str]) -> Iterator[str]:
    """A command line without credentials in addresses, and without the values of options that sound secret:
    `--name value`, `--name=value`, `name=value`."""
    option = ""
    for word in words:
        shown = masked(word, option)
        name, equals, value = shown.partition("=")
        yield f"{name}={masked(value, _key(name))}" if equals and "/" not in name else shown
        option = _key(word) if word.startswith("-") and not equals else ""


def _key(option: str) -> str:
    return option.lstrip("-").rpartition(".")[2]
