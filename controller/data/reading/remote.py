"""Datasets at an address: the files that are read, copied to this machine, before anything else looks at them.

    s3://bucket/rows ──listing──▶ view in the cache ──choose──▶ files of the chosen splits ──fetch──▶ copies

Of a directory only what is read is fetched; of the other files the view has the names. Errors and reports name
addresses, not places in the cache. Requests that fail for a passing reason are repeated, with pauses, until nothing
has come for `GIVE_UP_S`; what has come stays in the cache. Where the address does not answer at all, or
HF_HUB_OFFLINE is set, whole copies of an earlier time are read, with a warning.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from controller.data.errors import DataError
from controller.data.reading.cache import FileCache
from controller.data.reading.filesystems import RemoteError, RemoteFile, RemoteStore
from schema.config.data_files import MOST_ENTRIES
from schema.config.sections.dataset import CacheSettings
from schema.storage.address import AddressError, is_remote, parse_address
from schema.util.backoff import Backoff

T = TypeVar("T")
log = logging.getLogger("controller.data.prepare")  # one name for all of the preparation

PARALLEL = 8
"""Files on their way at once."""
LIST_S, GIVE_UP_S = 15.0, 120.0
"""Seconds without an answer after which an address, or a file that is being fetched, is given up."""
PAUSES = Backoff(first=0.5, most=15.0)
REPORT_EVERY_S = 5.0
_DESCRIPTIONS = ("README.md", "dataset_dict.json", "state.json")
"""Files that say which others are read."""
_YES = ("1", "true", "yes", "on")


class Located:
    """A path of this machine; a local name is its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def shown(self, path: Path) -> str:
        """A path at or below it as people call it; bytes that are not UTF-8 are replaced."""
        return os.fsencode(path).decode(errors="replace")

    def text(self, message: str) -> str:
        """A message in which paths have the names that people call them by."""
        return message

    def fetch(self, paths: Iterable[Path]) -> None:
        """Make sure that files are there before they are opened. Raises `DataError`."""


@cache
def located(name: str, settings: CacheSettings) -> Located:
    """Where a dataset's name or file lies on this machine: a process asks once. Raises `DataError`."""
    return _RemoteCopies.of(name, settings) if is_remote(name) else Located(Path(name))


class _RemoteCopies(Located):
    """The copies of what an address holds."""

    def __init__(
        self, store: RemoteStore, cache: FileCache, files: list[RemoteFile], place: str, offline: str
    ) -> None:
        self._store, self._cache, self._offline = store, cache, offline
        self._address = str(store.address)
        self._copies = {file.path: cache.copy_of(place, str(store.address_of(file)), file) for file in files}
        self._files = {file.path: file for file in files}
        self._view = cache.view(self._address, self._copies)
        self._done = 0
        self._reported, self._lock = time.monotonic(), threading.Lock()
        super().__init__(self._view / files[0].path if store.is_file else self._view)

    @staticmethod
    def of(name: str, settings: CacheSettings) -> _RemoteCopies:
        """List the files of an address, or read the list of an earlier time. Raises `DataError`."""
        try:
            store = RemoteStore(parse_address(name))
        except AddressError as error:
            raise DataError(f"{error}; {error.hint}") from None
        copies_here = FileCache(settings.root, settings.n_bytes)
        offline = ""
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
            offline = "HF_HUB_OFFLINE is set"
        else:
            try:
                place, files = patiently(lambda: (store.place, store.files()), LIST_S)
                if len(files) > MOST_ENTRIES:
                    raise DataError(f"{name} holds more than {MOST_ENTRIES:,} files; name its files in `files`")
                kept = {"place": place, "is_file": store.is_file, "files": [vars(file) for file in files]}
                copies_here.keep_listing(name, kept)
            except RemoteError as error:
                if not error.passing:
                    raise DataError(str(error)) from None
                offline = str(error)
        if offline:
            listing = copies_here.listing(name)
            if listing is None:
                raise DataError(_missing(name, offline, "all of it", copies_here))
            place, files = listing["place"], [RemoteFile(**fields) for fields in listing["files"]]
            store.is_file = listing["is_file"]
            log.warning("%s is read from copies of an earlier time in %s: %s", name, copies_here.root, offline)
        copies = _RemoteCopies(store, copies_here, files, place, offline)
        copies.fetch(copies._view / path for path in copies._files if Path(path).name in _DESCRIPTIONS)
        return copies

    def shown(self, path: Path) -> str:
        relative = "" if self._store.is_file else str(path.relative_to(self._view)).removeprefix(".")
        return f"{self._address}/{relative}" if relative else self._address

    def text(self, message: str) -> str:
        return message.replace(str(self.path), self._address)

    def fetch(self, paths: Iterable[Path]) -> None:
        chosen = [self._files[str(path.relative_to(self._view))] for path in paths if path != self._view]
        if all(self._is_here(file) for file in chosen):
            return
        if self._offline:
            absent = [file.path for file in chosen if not self._is_here(file)]
            what = absent[0] + (f" and {len(absent) - 1} more of its files" if len(absent) > 1 else "")
            raise DataError(_missing(self._address, self._offline, what, self._cache))
        with self._cache.fetching(self._address, lambda: log.info("%s: another process fetches it", self._address)):
            missing = [file for file in chosen if not self._is_here(file)]
            if not missing:
                return  # another process was first
            n_bytes = sum(file.size for file in missing)
            if not self._cache.make_room(n_bytes):
                log.warning(
                    "%s: with these files the cache has more than train.train_policy.dataset_cache_size = %g GiB, "
                    "since running jobs use what is in it",
                    self._address,
                    self._cache.limit / 2**30,
                )
            self._fetch_all(missing, n_bytes)

    def _is_here(self, file: RemoteFile) -> bool:
        return self._cache.is_whole(self._copies[file.path], file, connected=not self._offline)

    def _fetch_all(self, files: list[RemoteFile], n_bytes: int) -> None:
        began, self._done = time.monotonic(), 0
        log.info("%s: fetching %d files of %s to %s", self._address, len(files), _size(n_bytes), self._cache.root)
        with ThreadPoolExecutor(min(PARALLEL, len(files))) as pool:
            try:
                list(pool.map(lambda file: self._fetch(file, n_bytes), files))
            except (RemoteError, OSError) as error:
                pool.shutdown(cancel_futures=True)
                whole = sum(self._is_here(file) for file in files)
                fault = (
                    f"{error}; {whole} of {len(files)} files and the beginnings of others are in {self._cache.root}"
                )
                raise DataError(f"{fault}, and the next attempt goes on there") from None
        if time.monotonic() - began > REPORT_EVERY_S:
            log.info("%s: fetched in %.0f s", self._address, time.monotonic() - began)

    def _fetch(self, file: RemoteFile, total: int) -> None:
        def read(offset: int, n: int) -> bytes:
            content = patiently(lambda: self._store.read(file, offset, n), GIVE_UP_S)
            if offset + n == file.size:
                patiently(lambda: self._store.check_current(file), GIVE_UP_S)
            with self._lock:
                self._done += n
                if time.monotonic() - self._reported > REPORT_EVERY_S:
                    self._reported = time.monotonic()
                    log.info("%s: %s of %s", self._address, _size(self._done), _size(total))
            return content

        address = str(self._store.address_of(file))
        self._cache.fetch(self._copies[file.path], address, file, read, self._address)


def patiently(work: Callable[[], T], give_up: float) -> T:
    """The result of a request, repeated while its failures are passing ones. Raises `RemoteError`."""
    attempt, began = 0, time.monotonic()
    while True:
        try:
            return work()
        except RemoteError as error:
            attempt += 1
            waited = time.monotonic() - began
            if not error.passing:
                raise
            pause = PAUSES.after(attempt)
            if waited + pause > give_up:
                raise RemoteError(f"{error} (attempts: {attempt}, in {waited:.0f} s)", passing=True) from None
            log.warning("%s; attempt %d in %.1f s", error, attempt + 1, pause)
            time.sleep(pause)


def _missing(address: str, why: str, what: str, cache: FileCache) -> str:
    return (
        f"{address} cannot be read, since {why}, and the cache {cache.root} lacks {what}; with a connection, "
        "`cosmos-launch validate run.toml --data` fills the cache; without one, copy the files to this machine and "
        "name their path, or name a filled cache in train.train_policy.dataset_cache_dir; docs/operations.md lists "
        "the variables of endpoint, credentials and proxy"
    )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes > 1e8 else f"{n_bytes / 1e6:,.2f} MB"
