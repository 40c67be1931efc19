"""Copies of remote files on this machine, shared by all jobs that name the same cache.

    files/copies/<id>          one version of one file, read only; empty until it is fetched
    files/copies/<id>.json     its address, size and hash: written last, so without it the copy is not whole
    files/partial/<id>…        what is on its way; fetching goes on where it stopped
    files/views/<id>/…         the files of an address by their own names: links to copies
    files/listings/<id>.json   what an address held when it was last asked
    rows/…                     prepared rows, see `rows_cache`: copies and they share the limit

An id is a hash of place, address, size and version: a file that changes has another copy, and a job that reads the
old one goes on. A process that uses a view holds its lock, and nothing that it links to is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.data.errors import DataError
from controller.data.reading.filesystems import ChangedError, RemoteFile
from schema.util.atomic_file import write_text
from schema.util.file_lock import open_lock, release, try_lock

_BLOCK = 4 * 1024 * 1024
_WAIT_S = 0.2
SETTLED_S = 2.0
"""A copy that was fetched so soon after its file was written is fetched again: stores date versions by the second,
and another one of the same second and size looks the same."""
_FORGET_S = 7 * 86_400.0
"""Seconds after which what nobody goes on fetching is removed."""


@dataclass(frozen=True)
class Entry:
    """Something in a cache that may be removed. used: when it was last of use. also: files that go with it."""

    path: Path
    n_bytes: int
    used: float
    also: tuple[Path, ...] = ()


def remove_oldest(entries: Iterable[Entry], limit: int, kept: Collection[Path]) -> int:
    """Remove those that were not of use for the longest time until the rest fits; answers the bytes that are left.

    kept: entries that stay, whatever the limit.
    """
    ordered = sorted(entries, key=lambda entry: entry.used)
    total = sum(entry.n_bytes for entry in ordered)
    for entry in ordered:
        if total <= limit:
            break
        if entry.path not in kept:
            for path in (*entry.also, entry.path):
                path.unlink(missing_ok=True)
            total -= entry.n_bytes
    return total


class FileCache:
    """The copies below one directory. limit: bytes that all copies may have, prepared rows included."""

    _held: dict[Path, int] = {}  # noqa: RUF012 - of the process: a lock for each view that it uses
    _verified: set[Path] = set()  # noqa: RUF012 - of the process: copies whose hash was right

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root.resolve() / "files", limit  # links are followed: copies in use have whole paths
        try:
            for folder in ("copies", "partial", "views", "listings"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
            rows_folder(self.root).mkdir(exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> DataError:
        fault = f"the cache {self.root} cannot be written: {error.strerror or error}"
        return DataError(f"{fault}; set train.train_policy.dataset_cache_dir to a directory that can")

    # ---- copies -------------------------------------------------------------------------------------------

    def copy_of(self, place: str, address: str, file: RemoteFile) -> Path:
        """Where the copy of a file lies, or will lie."""
        return self.root / "copies" / _id(place, address, str(file.size), file.version)

    def is_whole(self, copy: Path, file: RemoteFile, *, connected: bool = True) -> bool:
        """Whether the copy is there and undamaged, which is looked at once in a process. Its use is noted.

        connected: whether it can be fetched again: else one that may be of an older version (`SETTLED_S`) is good.
        """
        record_path = _record(copy)
        try:
            record = json.loads(record_path.read_text(encoding="utf-8"))
            if copy.stat().st_size != file.size:
                return False
            if copy not in self._verified and _sha256(copy) != record["sha256"]:
                return False
            if connected and copy not in self._verified and record["fetched"] - file.modified < SETTLED_S:
                return False
            with suppress(PermissionError):  # another user's, who can be read
                os.utime(record_path)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self._verified.add(copy)
        return True

    def fetch(
        self, copy: Path, address: str, file: RemoteFile, read: Callable[[int, int], bytes], owner: str
    ) -> None:
        """Make the copy. read: gives bytes from an offset. owner: what is being fetched, to name partial files.

        Raises OSError, and what `read` raises; what has come stays, and is gone on with.
        """
        started, partial = time.time(), self.root / "partial" / f"{copy.name}-{_id(owner)[:8]}"
        with partial.open("ab") as target:
            at = target.seek(0, os.SEEK_END)
            if at > file.size:
                target.truncate(at := 0)
            try:
                while at < file.size:
                    at += target.write(read(at, min(_BLOCK * 4, file.size - at)))
            except ChangedError:
                target.truncate(0)
                raise
        facts = {"address": address, "size": file.size, "sha256": _sha256(partial), "fetched": started}
        text = json.dumps(facts)
        _record(copy).unlink(missing_ok=True)
        os.replace(partial, copy)
        write_text(_record(copy), text)
        self._verified.add(copy)

    def make_room(self, n_bytes: int) -> bool:
        """Remove old copies so that so many bytes more fit below the limit; answers whether they do.

        Copies that a running process uses stay. Raises `DataError` where the disk is full.
        """
        with self.alone(self.root / "lock"):
            in_use = {link.resolve() for view in self._views_in_use() for link in _links(view)}
            rows = rows_folder(self.root)
            unfinished = [*(self.root / "partial").iterdir(), *rows.glob(".*"), *self._unrecorded(in_use)]
            for partial in unfinished:
                with suppress(FileNotFoundError):
                    if time.time() - partial.stat().st_mtime > _FORGET_S:
                        partial.unlink()
            left = remove_oldest(list(self._entries()), max(0, self.limit - n_bytes), in_use)
        free = shutil.disk_usage(self.root).free
        if n_bytes > free:
            raise DataError(
                f"{n_bytes / 1e9:,.1f} GB are to be fetched into {self.root}, where {free / 1e9:,.1f} GB are free; "
                "set train.train_policy.dataset_cache_dir to a larger disk"
            )
        return left + n_bytes <= self.limit

    # ---- views and listings -------------------------------------------------------------------------------

    def view(self, name: str, copies: Mapping[str, Path]) -> Path:
        """A directory with a link to each copy by its path; it and the copies stay as long as this process lives.

        Raises `DataError` where nothing can be written.
        """
        try:
            return self._view(name, copies)
        except PermissionError as error:
            raise self._unwritable(error) from None

    def _view(self, name: str, copies: Mapping[str, Path]) -> Path:
        view = self.root / "views" / _id(name, *(f"{path}\0{copy.name}" for path, copy in copies.items()))
        if view not in self._held:
            lock = view.with_suffix(".lock")
            descriptor = open_lock(lock, shared=True)
            while not try_lock(descriptor, exclusive=False):
                time.sleep(_WAIT_S)
            self._held[view] = descriptor
        for path, copy in copies.items():
            link = view / path
            if not copy.exists():
                copy.touch()
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):  # made by another process at the same moment
                    link.symlink_to(os.path.relpath(copy, link.parent))
        return view

    def _views_in_use(self) -> Iterator[Path]:
        """Yield the views whose lock a process holds; those that nobody uses are removed."""
        for view in [path for path in (self.root / "views").iterdir() if path.is_dir()]:
            descriptor = open_lock(view.with_suffix(".lock"), shared=True)
            is_free = view not in self._held and try_lock(descriptor, exclusive=True)
            if is_free:
                shutil.rmtree(view, ignore_errors=True)
            release(descriptor)
            if not is_free:
                yield view

    def _unrecorded(self, in_use: Collection[Path]) -> Iterator[Path]:
        """Yield what a killed process has put into its place without a record, which nobody will ever find."""
        for folder in (self.root / "copies", rows_folder(self.root)):
            for path in folder.iterdir():
                is_data = path.suffix not in (".json", ".lock") and not path.name.startswith(".")
                if is_data and path not in in_use and not path.with_suffix(".json").exists():
                    yield path

    def _entries(self) -> Iterator[Entry]:
        for record in (self.root / "copies").glob("*.json"):
            with suppress(FileNotFoundError):
                copy = record.with_suffix("")
                yield Entry(copy, copy.stat().st_size, record.stat().st_mtime, (record,))
        for record in rows_folder(self.root).glob("*.json"):
            with suppress(FileNotFoundError):
                files = tuple(record.parent.glob(f"{record.stem}.*"))
                n_bytes = sum(path.stat().st_size for path in files)
                yield Entry(record, n_bytes, record.stat().st_mtime, files)

    def listing(self, address: str) -> dict[str, Any] | None:
        """The listing of an address that was kept last; None: there is none."""
        try:
            kept: dict[str, Any] = json.loads(self._listing(address).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return kept

    def keep_listing(self, address: str, content: dict[str, Any]) -> None:
        """Keep what an address holds."""
        write_text(self._listing(address), json.dumps({"address": address, **content}))

    def _listing(self, address: str) -> Path:
        return self.root / "listings" / f"{_id(address)}.json"

    @contextmanager
    def fetching(self, address: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Let one process at a time fetch the files of an address. waiting: is called once where another one does."""
        with self.alone(self._listing(address).with_suffix(".lock"), waiting):
            yield

    @contextmanager
    def alone(self, path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of a file. waiting: is called once where another process has it."""
        try:
            descriptor = open_lock(path, shared=True)
        except PermissionError as error:
            raise self._unwritable(error) from None
        try:
            if not try_lock(descriptor, exclusive=True):
                waiting()
                while not try_lock(descriptor, exclusive=True):
                    time.sleep(_WAIT_S)
            yield
        finally:
            release(descriptor)


def rows_folder(root: Path) -> Path:
    """The directory of prepared rows next to that of copies."""
    return root.with_name("rows")


def _id(*parts: str) -> str:
    return hashlib.sha256("\0\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def _record(copy: Path) -> Path:
    return copy.with_suffix(".json")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _links(view: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(view):
        yield from (Path(folder, name) for name in names)
