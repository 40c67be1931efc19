"""Where versions lie: the `Store` protocol, and the directory that all replicas see.

    <root>/
      t0-v00000007-5f0c1d2e/        one version: immutable once it has this name
        manifest.json
        00000.safetensors
      .tmp-t0-v00000008-1b2c3d4e/   being written; nobody reads it
      .trash-t0-v00000003-9a8b7c6d/ being deleted; nobody opens it any more

Invariant: a version becomes visible whole, by one rename, and is never written again. A reader therefore
sees all of a version or none of it; what a file system shows late or loses is caught by the hashes of the
manifest. Another store (an object store, say) keeps the invariant by writing `manifest.json` last in
`commit`.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol

from weight_sync.errors import NotReadableError, WeightError

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Names of versions and files: never hidden, never a path, the same on every file system."""

_TMP, _TRASH = ".tmp-", ".trash-"


class Stage(Protocol):
    """A version being written; `commit` makes it visible, leaving the context without it throws it away."""

    def create(self, file: str) -> AbstractContextManager[IO[bytes]]:
        """A new seekable file of the version."""

    def commit(self) -> None:
        """Make the version visible under its name, whole."""


class Store(Protocol):
    """A place for versions. Keys are `<version>/<file>`."""

    def stage(self, version: str) -> AbstractContextManager[Stage]:
        """Start to write a version. Raises `WeightError` when the name is taken or not allowed."""

    def read(self, key: str) -> memoryview:
        """The bytes of a file, mapped where possible. Raises `NotReadableError` when it is not there."""

    def versions(self) -> list[str]:
        """Names of all visible versions, sorted."""

    def age(self, version: str) -> float:
        """Seconds since the version became visible; infinity when it is gone."""

    def delete(self, version: str) -> bool:
        """Remove a version; those who already read it keep what they mapped. False when it was gone."""

    def sweep(self, older_than: float, beginning: str = "") -> None:
        """Remove what writers and deleters that died left behind of versions whose names begin so, once it is
        `older_than` seconds old."""


def split_key(key: str) -> tuple[str, str]:
    """`<version>/<file>` in its parts. Raises `WeightError` for anything else: no key leaves a store."""
    parts = key.split("/")
    if len(parts) != 2 or not all(FILE_NAME.fullmatch(part) for part in parts):
        raise WeightError(f"{key!r} is not a key of a weight store (expected <version>/<file>)")
    return parts[0], parts[1]


class _DirectoryStage:
    def __init__(self, path: Path, target: Path, durable: bool) -> None:
        self.path, self.target, self.durable = path, target, durable
        self.committed = False

    @contextmanager
    def create(self, file: str) -> Iterator[IO[bytes]]:
        if not FILE_NAME.fullmatch(file):
            raise WeightError(f"{file!r} cannot be the name of a file in a weight store")
        with (self.path / file).open("xb") as stream:
            yield stream
            if self.durable:
                stream.flush()
                os.fsync(stream.fileno())

    def commit(self) -> None:
        if self.durable:
            _sync_directory(self.path)
        self.path.rename(self.target)
        self.committed = True
        if self.durable:
            _sync_directory(self.target.parent)


class DirectoryStore:
    """A `Store` in one directory.

    Files are not forced to disk unless `durable` is set: a publication is never what a job resumes from
    (that is a checkpoint), after a power cut torn files are refused by their hashes, and waiting for the
    disk would hold up every step. Closing a file is what makes it visible to other clients of NFS and the
    like.
    """

    def __init__(self, root: str | os.PathLike[str], *, durable: bool = False) -> None:
        self.root = Path(root)
        self.durable = durable

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.root)!r})"

    @contextmanager
    def stage(self, version: str) -> Iterator[_DirectoryStage]:
        if not FILE_NAME.fullmatch(version):
            raise WeightError(f"{version!r} cannot be the name of a version in a weight store")
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / version
        if target.exists():
            raise WeightError(f"version {target} exists already: versions are never overwritten")
        path = self.root / f"{_TMP}{version}-{secrets.token_hex(4)}"
        path.mkdir()
        stage = _DirectoryStage(path, target, self.durable)
        try:
            yield stage
        finally:
            if not stage.committed:
                shutil.rmtree(path, ignore_errors=True)

    def read(self, key: str) -> memoryview:
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
            if status.st_size == 0:
                return memoryview(b"")
            # Private and writable: consumers get ordinary tensors, and no write of theirs reaches the file.
            return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY))
        except OSError as error:
            raise NotReadableError(f"{path}: {error.strerror}") from error
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
        if not FILE_NAME.fullmatch(version):
            raise WeightError(f"{version!r} is not the name of a version")
        trash = self.root / f"{_TRASH}{version}-{secrets.token_hex(4)}"
        try:
            (self.root / version).rename(trash)  # from here on nobody opens it
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


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # vanished since it was listed
        return False


def _age(path: Path) -> float:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
