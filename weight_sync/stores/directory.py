"""The store in a directory that all replicas see.

    <root>/
      t0-v00000007-5f0c1d2e/        one version: immutable once it has this name
        manifest.json
        00000.safetensors
      .tmp-t0-v00000008-1b2c3d4e/   being written, by one process or several; never read
      .trash-t0-v00000003-9a8b7c6d/ being deleted; never opened again

A version becomes visible by one rename.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from schema.util.atomic_file import replacing
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.stores.base import FILE_NAME, check_name, check_size, split_key

_TMP, _TRASH, _PROBE = ".tmp-", ".trash-", ".probe-"


class _DirectoryStage:
    def __init__(self, path: Path, target: Path, *, leads: bool) -> None:
        self.path, self.target, self.leads = path, target, leads
        self.committed = False

    @contextmanager
    def create(self, file: str) -> Iterator[IO[bytes]]:
        check_name(file, "file")
        with (self.path / file).open("xb") as stream:
            try:
                yield stream
            except BaseException:
                (self.path / file).unlink(missing_ok=True)
                raise

    def commit(self) -> None:
        if not self.leads:
            raise WeightError(f"version {self.target} is made visible by the process that leads")
        self.path.rename(self.target)
        self.committed = True


class DirectoryStore:
    """A `Store` in one directory.

    Files are not forced to disk: a publication is never what a job resumes from
    (that is a checkpoint), after a power cut torn files are refused by their hashes, and waiting for the
    disk would hold up every step. Closing a file is what makes it visible to other clients of NFS and the
    like."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.root)!r})"

    @property
    def directory(self) -> Path:
        return self.root

    @contextmanager
    def stage(self, version: str, *, leads: bool = True) -> Iterator[_DirectoryStage]:
        check_name(version, "version")
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / version
        if target.exists():
            raise WeightError(f"version {target} exists already: versions are never overwritten")
        path = self.root / f"{_TMP}{version}"
        path.mkdir(exist_ok=True)
        stage = _DirectoryStage(path, target, leads=leads)
        try:
            yield stage
        finally:
            if leads and not stage.committed:
                shutil.rmtree(path, ignore_errors=True)

    def read(self, key: str) -> memoryview:
        with self._opened(key) as (descriptor, size):
            if size == 0:
                return memoryview(b"")
            # Private and writable: consumers get ordinary tensors, and no write of theirs reaches the file.
            try:
                return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
            except ValueError as error:  # it has fewer bytes by now
                raise NotReadableError(f"{key} was cut while it was opened: {error}") from error

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        with self._opened(key) as (descriptor, size):
            check_size(key, size, n_bytes)
            with replacing(to) as temporary, temporary.open("xb") as stream:
                for piece in _pieces(descriptor, key):
                    stream.write(piece)
        return size

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Descriptor and bytes of a file. Raises `NotReadableError` when it is not there."""
        version, file = split_key(key)
        path = self.root / version / file
        try:
            descriptor = self._open(version, file)
        except OSError as error:
            raise NotReadableError(f"{path}: {error.strerror} (collected, or not visible yet?)") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise WeightError(f"{path} is not a regular file")
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    def _open(self, version: str, file: str) -> int:
        # No links are followed, so a version cannot point out of the store; a fifo cannot block the reader.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = os.open(self.root / version, flags | os.O_DIRECTORY)
        try:
            return os.open(file, flags | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)

    def versions(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(e.name for e in entries if FILE_NAME.fullmatch(e.name) and _is_directory(e))
        except FileNotFoundError:
            return []

    def age(self, version: str) -> float:
        return _age(self.root / version)

    def delete(self, version: str) -> bool:
        check_name(version, "version")
        trash = self.root / f"{_TRASH}{version}-{secrets.token_hex(4)}"
        try:
            (self.root / version).rename(trash)  # from here on no process opens it
        except FileNotFoundError:
            return False
        shutil.rmtree(trash, ignore_errors=True)  # what a busy file system keeps is swept later
        return True

    def sweep(self, older_than: float, beginning: str = "") -> None:
        marks = (_TMP + beginning, _TRASH + beginning)
        try:
            with os.scandir(self.root) as entries:
                left = [e.name for e in entries if e.name.startswith(marks) and _is_directory(e)]
        except FileNotFoundError:
            return
        for name in left:
            if _age(self.root / name) >= older_than:
                shutil.rmtree(self.root / name, ignore_errors=True)

    def probe(self, *, writing: bool) -> None:
        try:
            if writing:
                self.root.mkdir(parents=True, exist_ok=True)
                probe = self.root / f"{_PROBE}{secrets.token_hex(4)}"
                probe.touch()
                probe.unlink()
            elif self.root.exists():  # the first one who writes makes it
                self.versions()
        except OSError as error:
            doing = "written" if writing else "read"
            raise WeightError(
                f"the directory {self.root} cannot be {doing}: {error.strerror}: let user {os.geteuid()} do so, or "
                f"name another directory"
            ) from error

    def trouble(self) -> str:
        return ""  # a file system that fails is an error at once: nothing here tries again


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # vanished since it was listed
        return False


def _pieces(descriptor: int, key: str) -> Iterator[bytes]:
    """A file from its beginning. Raises `NotReadableError`: on NFS one may go while it is read."""
    while True:
        try:
            piece = os.read(descriptor, 1 << 20)
        except OSError as error:
            raise NotReadableError(f"{key}: {error.strerror} while it was read") from error
        if not piece:
            return
        yield piece


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")
