"""A process that shares a host copy, for tests; it can be made to die at a chosen line of `weight_sync`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.queues import Queue
from pathlib import Path
from types import FrameType
from typing import Any

import weight_sync
from schema.util.file_lock import release
from schema.wire.weights import Publication
from tests.support.waiting import PATIENCE
from tests.weight_sync.versions import RemoteStore, Versions, same
from weight_sync.host.files import open_copy
from weight_sync.host.host_copy import CopiedWeights, HostCopy
from weight_sync.stores import DirectoryStore

FOLDER = str(Path(weight_sync.__file__).parent)


def processes() -> ForkServerContext:
    """Where `share` is started: a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.weight_sync.host.advancer"])
    return context


class Lines:
    """Counts the lines of `weight_sync` that any thread runs, and kills the process before one of them: by number, or
    the first one of a function."""

    def __init__(self, last: int | str) -> None:
        self.count, self._last, self._lock = 0, last, threading.Lock()

    def begin(self) -> None:
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            with self._lock:
                self.count += 1
                if self._last in (self.count, frame.f_code.co_name):
                    os.kill(os.getpid(), signal.SIGKILL)
        return self._trace


def share(
    directory: Path,
    root: Path,
    notes: Path | None,
    publications: Sequence[Publication],
    told: Queue[Any],
    go: Any = None,
    die_at: int | str | None = None,
) -> None:
    """Bring the copy to each of the publications, tell of each (version, bytes fetched, content hash as read), leave.

    notes: of a `RemoteStore`; None: the directory is the store. go: an event to wait for before leaving.
    die_at: the line before which the process dies, or the function. When it is given, the count of lines is told in
        the end.
    """
    store = DirectoryStore(root) if notes is None else RemoteStore(root, notes)
    lines = Lines(die_at or 0)
    if die_at is not None:
        lines.begin()
    copy = HostCopy(directory, store, lock_timeout=PATIENCE)
    for publication in publications:
        weights = copy.advance(publication, patience=0.0)
        with open_copy(directory) as view:
            told.put((weights.publication.version, weights.n_bytes, view.content_hash))
    if go is not None:
        assert go.wait(PATIENCE)
    sys.settrace(None)
    if die_at is not None:
        told.put(lines.count)
        told.close()
        told.join_thread()
        os._exit(0)  # leaving would remove the copy
    copy.close()


def right(weights: CopiedWeights, versions: Versions) -> bool:
    """Whether a copy holds the newest version, bit by bit."""
    with weights.reading() as publication:
        return publication == versions.newest and same(weights.tensors(), versions.weights[-1])


def vanish(copy: HostCopy) -> None:
    """As after kill -9: the kernel releases the locks, nothing is removed."""
    assert copy._users is not None
    release(copy._users)
    copy._users = None


def started(*args: Any, **options: Any) -> ForkServerProcess:
    """A process that runs `share` with these arguments."""
    process = processes().Process(target=share, args=args, kwargs=options)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int | None:
    """Its exit code, negative for a signal."""
    process.join(PATIENCE)
    code = process.exitcode
    process.close()
    return code
