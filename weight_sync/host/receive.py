"""Getting the pieces of a store to where this host reads them, each proven before it is handed out.

    directory store   deltas are read where they lie, full forms are copied
    other stores      everything is downloaded, deltas into a directory store of this host's own

What is missing, short or different is tried `TRIES` times with growing pauses that add up to `patience` seconds: a
shared file system may show a file late or in pieces, a download may be torn. Of several files only the bad ones are
fetched again. What can never become right (a manifest that contradicts itself) is an error at once.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from schema.wire.weights import FileEntry, Piece, WeightManifest
from weight_sync.errors import NotReadableError, StoppedError
from weight_sync.manifest import Opened, open_file, open_piece, parse_manifest
from weight_sync.stores import DirectoryStore, ReadableStore, split_key

log = logging.getLogger(__name__)

T = TypeVar("T")
TRIES = 5
THREADS = 4
"""Files on their way at once: more help only where one connection is far slower than the network."""


class Receiver:
    """Gets pieces for one advance; `seconds` ("fetch", "verify") and `n_bytes` add up what it did.

    store: where the pieces lie. fetched: folder for deltas of a store that is not a local directory.
    stop: set from another thread, ends pauses and keeps further files from being fetched."""

    def __init__(self, store: ReadableStore, fetched: Path, patience: float, stop: threading.Event) -> None:
        self._store, self._fetched, self._patience, self._stop = store, fetched, patience, stop
        self.seconds = {"fetch": 0.0, "verify": 0.0}
        self.n_bytes = 0
        self._manifests: dict[str, tuple[bytes, WeightManifest]] = {}
        self._lock = threading.Lock()

    @property
    def root(self) -> Path:
        """Where deltas lie for this host's processes."""
        return self._store.directory or self._fetched

    def manifest(self, piece: Piece) -> WeightManifest:
        """The manifest of a piece, read once. Raises `WeightError` after the last try."""
        if piece.uri not in self._manifests:
            self._timed("fetch", lambda: self._tried(lambda: self._read_manifest(piece)))
        return self._manifests[piece.uri][1]

    def delta(self, piece: Piece) -> Opened:
        """A delta, proven, its files below `root`. Raises `WeightError` after the last try."""
        if self._store.directory is not None:
            opened = self._timed("verify", lambda: self._tried(lambda: self._open(piece)))
            self._count(piece.n_bytes)
            return opened
        here = self._fetched / split_key(piece.uri)[0]
        if here.exists():
            try:
                return self._timed("verify", lambda: self._open(piece))
            except NotReadableError as error:
                log.warning("a fetched delta was damaged, fetching it again: %s", error)
                shutil.rmtree(here)
        self._download_delta(piece)
        return self._timed("verify", lambda: self._open(piece))

    def full(self, piece: Piece, folder: Path) -> WeightManifest:
        """The data files of a full form in a new folder, proven there. Raises `WeightError` after the last try."""
        manifest = self.manifest(piece)
        folder.mkdir(mode=0o700)
        self._files(piece, manifest, folder)
        return manifest

    def _open(self, piece: Piece) -> Opened:
        return open_piece(DirectoryStore(self.root), piece, "delta")

    def _read_manifest(self, piece: Piece) -> None:
        text = bytes(self._store.read(piece.uri))
        self._manifests[piece.uri] = text, parse_manifest(text, piece)

    def _download_delta(self, piece: Piece) -> None:
        version, name = split_key(piece.uri)
        manifest = self.manifest(piece)
        temporary = self._fetched / "incoming"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700, parents=True)
        self._files(piece, manifest, temporary)
        (temporary / name).write_bytes(self._manifests[piece.uri][0])
        temporary.rename(self._fetched / version)

    def _files(self, piece: Piece, manifest: WeightManifest, folder: Path) -> None:
        """Fetch all data files into a folder, and prove them there."""
        version, _ = split_key(piece.uri)
        local = DirectoryStore(folder.parent)
        wanted, fault = list(manifest.files), None

        def download(file: FileEntry) -> None:
            self._check_stop()
            to = folder / file.name
            to.unlink(missing_ok=True)  # of the try before: room is there for one
            self._store.download(f"{version}/{file.name}", to, file.n_bytes)
            self._count(file.n_bytes)

        def prove(file: FileEntry) -> None:
            open_file(local, folder.name, file, manifest)

        for pause in self._pauses():
            self._wait(pause, fault)
            failed = self._each("fetch", download, wanted)
            failed |= self._each("verify", prove, [file for file in wanted if file.name not in failed])
            wanted = [file for file in wanted if file.name in failed]
            if not wanted:
                return
            fault = failed[wanted[0].name]
        assert fault is not None
        raise fault

    def _each(
        self, stage: str, work: Callable[[FileEntry], None], files: Sequence[FileEntry]
    ) -> dict[str, NotReadableError]:
        """Do the work for each file, several at once; what went wrong by name of file. Other errors are raised."""

        def one(file: FileEntry) -> NotReadableError | None:
            try:
                work(file)
            except NotReadableError as error:
                return error
            return None

        if not files:
            return {}
        with ThreadPoolExecutor(min(THREADS, len(files))) as pool:
            faults = self._timed(stage, lambda: list(pool.map(one, files)))
        return {file.name: fault for file, fault in zip(files, faults, strict=True) if fault is not None}

    def _tried(self, work: Callable[[], T]) -> T:
        fault: NotReadableError | None = None
        for pause in self._pauses():
            self._wait(pause, fault)
            try:
                return work()
            except NotReadableError as error:
                fault = error
        assert fault is not None
        raise fault

    def _pauses(self) -> Iterator[float]:
        """Before each try."""
        yield 0.0
        for i in range(TRIES - 1):
            yield self._patience * 2**i / (2 ** (TRIES - 1) - 1)

    def _wait(self, pause: float, fault: NotReadableError | None) -> None:
        if fault is not None:
            log.info("trying again in %.2f s: %s", pause, fault)
        self._stop.wait(pause)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError("fetching was given up: this process ends")

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.n_bytes += n_bytes

    def _timed(self, stage: str, work: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return work()
        finally:
            self.seconds[stage] += time.monotonic() - began
