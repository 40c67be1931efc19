"""The one copy of the weights on a host: all replicas of a job share it, the first one brings it forward.

    advance(publication)   bring the copy there (`weight_sync.host.advance`), one process at a time
    reading()              the whole weights that are there, maybe newer ones; they do not change meanwhile
    changes_since(hash)    deltas on this host that lead from there to here, for engines that change in place

Invariant: what is handed out was proven by its hashes, and is never older than what was asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from schema.wire.weights import Piece, Publication
from weight_sync.download_plan import deltas_between, links_of
from weight_sync.errors import NotReadableError
from weight_sync.host.advance import Advance
from weight_sync.host.files import FETCHING, LOCK_TIMEOUT, CopyState, CopyView, WritableTensors, bytes_of, open_copy
from weight_sync.host.locks import locked
from weight_sync.host.receive import Receiver
from weight_sync.host.users import join, leave, stay
from weight_sync.manifest import piece_of
from weight_sync.stores import ReadableStore

log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds: attribute caches of NFS live 3 to 60 s by default; longer than this is a broken store."""
WORTH_SHARE = 0.5
"""Share of the weights' bytes: deltas of more are not worth applying one by one, loading the whole costs no more."""


def whole_bytes(
    store: ReadableStore, publication: Publication, *, patience: float = PATIENCE, stop: threading.Event | None = None
) -> int:
    """Bytes of a publication's weights as a whole, from its manifest; arguments and errors as of `HostCopy`."""
    receiver = Receiver(store, Path(), patience, threading.Event() if stop is None else stop)
    manifest = receiver.manifest(piece_of(publication))
    links = links_of(manifest, piece_of(publication))
    return max((link.full.n_bytes for link in links if link.full is not None), default=publication.n_bytes)


@dataclass(slots=True)
class CopiedWeights:
    """The weights that an engine is given: the whole ones, and the deltas that lead there."""

    publication: Publication
    """The publication that the copy held when it was handed out: the one asked for, or a newer one."""
    copy_directory: Path
    n_bytes: int
    """Fetched by this process for it; 0 where another one did."""
    seconds: dict[str, float]
    """"wait" (for another process), "fetch", "verify", "advance" (writing over the copy, and hashing the result)."""
    density: float | None
    """Elements that deltas gave anew, of all; None where this process applied none."""
    _copy: HostCopy
    _state: CopyState
    _root: Path
    _view: CopyView | None = None

    def changes_since(self, content_hash: str) -> list[tuple[Path, Piece]] | None:
        """The deltas from the weights with this content hash to `publication`, oldest first, each with the root of
        the local store in which it lies (for `open_delta`). Empty when these are the same weights.

        None: no such way exists, one of the deltas was not proven by applying it to this very copy, or the whole
        copy costs less. A file may still vanish before it is opened (`NotReadableError`): then the whole copy is
        what remains."""
        pieces = deltas_between(self._state.checked, content_hash)
        if pieces is None or sum(piece.n_bytes for piece in pieces) > WORTH_SHARE * bytes_of(self._state):
            return None
        if not all((self._root / piece.uri).exists() for piece in pieces):
            return None
        return [(self._root, piece) for piece in pieces]

    @contextmanager
    def reading(self, *, timeout: float = LOCK_TIMEOUT) -> Iterator[Publication]:
        """Keep the copy as it is while it is read; yields what it holds now: `publication`, or a newer one.

        Raises `LockTimeoutError`: another process changes it for longer than `timeout` seconds; `WeightError`: the
        copy was torn by a process that died, or lost files, and could not be mended."""
        with self._copy.reading(self.publication, timeout) as view:
            assert view.publication is not None, "a proven copy names its publication"
            self._view = view
            try:
                yield view.publication
            finally:
                self._view = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All names and tensors of what `reading` has yielded. Views: they end with it."""
        assert self._view is not None, "tensors() outside of reading()"
        return self._view.tensors()


class HostCopy:
    """This process's share in the copy. One thread at a time advances; any may read.

    directory: of the copy (`host_users.copy_directory`). store: where publications lie.
    lock_timeout: seconds to wait for other processes of the host.
    stop: set from any thread, it ends an `advance` under way soon, with `StoppedError`.

    Raises `CacheError` when the directory cannot be used."""

    def __init__(
        self,
        directory: Path,
        store: ReadableStore,
        *,
        lock_timeout: float = LOCK_TIMEOUT,
        stop: threading.Event | None = None,
    ) -> None:
        self.directory = directory
        self._store, self._lock_timeout = store, lock_timeout
        self._stop = threading.Event() if stop is None else stop
        self._writable = WritableTensors(directory)
        self._joining = threading.Lock()
        self._users: int | None = join(directory)

    def close(self) -> None:
        """Give the share back; the last one removes the directory. After `advance` and `reading` have ended."""
        if self._users is not None:
            self._writable.forget()
            leave(self.directory, self._users)
            self._users = None

    def advance(self, publication: Publication, *, patience: float = PATIENCE) -> CopiedWeights:
        """Bring the copy to a publication, unless it is there or further. Blocks; call it from a thread.

        patience: seconds for which each file that is missing or wrong is tried again, before a way without it is
        looked for.

        Raises:
            CacheError: no room, or no place. StoppedError: `stop` was set. LockTimeoutError: others hold the copy.
            StoreError: the store refuses, or fails for too long.
            WeightError: no way leads to it; the message says what was tried."""
        began = time.monotonic()
        self._stay()
        advance = Advance(
            self.directory,
            self._store,
            self._writable,
            patience=patience,
            lock_timeout=self._lock_timeout,
            stop=self._stop,
        )
        with locked(self.directory / FETCHING, exclusive=True, timeout=self._lock_timeout, stop=self._stop):
            waited = time.monotonic() - began
            state = advance.to(publication)
        return CopiedWeights(
            publication=state.publication or publication,
            copy_directory=self.directory,
            n_bytes=advance.n_bytes,
            seconds={"wait": waited, **advance.seconds},
            density=advance.density,
            _copy=self,
            _state=state,
            _root=advance.root,
        )

    def _stay(self) -> None:
        with self._joining:  # a reader may have to mend the copy while another thread advances it
            assert self._users is not None, "advance() after close()"
            anew = stay(self.directory, self._users)
            if anew is not None:
                self._users = anew

    @contextmanager
    def reading(self, publication: Publication, timeout: float) -> Iterator[CopyView]:
        """Do as `CopiedWeights.reading`: the copy, mended first where `open_copy` finds none that is whole and
        proven."""
        with ExitStack() as stack:
            try:
                view = stack.enter_context(open_copy(self.directory, timeout=timeout, stop=self._stop))
            except NotReadableError as error:
                log.warning("mending the copy of the weights: %s", error)
                self.advance(publication)
                view = stack.enter_context(open_copy(self.directory, timeout=timeout, stop=self._stop))
            yield view
