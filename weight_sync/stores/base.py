"""A store of weight versions: the protocols, and the names of what lies in one.

    <version>/manifest.json          <version>/<file>

Invariant: a version becomes visible whole and is never written again. A reader therefore sees all of a version or
none of it; what a file system or network shows late, cuts short or loses is caught by the hashes of the manifest.
Keys never leave a store: both their parts are plain names.
"""

from __future__ import annotations

import re
import secrets
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Protocol

from weight_sync.errors import NotReadableError, WeightError

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Names of versions and files: never hidden, never a path, the same on every file system."""
MANIFEST = "manifest.json"
"""The file that a version cannot be visible without."""
HEAD_BYTES = 16 << 20
"""How far back a file that is being written can always be changed."""

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_VERSION = re.compile(r"(?:(?P<name>[A-Za-z0-9][A-Za-z0-9_-]*)\.)?t\d+-v\d{8,}-[0-9a-f]{16}")


class Stage(Protocol):
    """A version being written; `commit` makes it visible, leaving the context without it throws it away."""

    def create(self, file: str) -> AbstractContextManager[IO[bytes]]:
        """A new file of the version: bytes are appended, and after a `seek` those among the first `HEAD_BYTES` may be
        written again. It is complete when the context is left, and nothing when that happens by an exception.

        Raises `WeightError`: the name is not allowed, or the store refuses. `OSError`: a file system refuses."""

    def commit(self) -> None:
        """Make the version visible under its name, whole. Only for the process that leads."""


class ReadableStore(Protocol):
    """A place for versions, as a replica needs it. Keys are `<version>/<file>`. Thread-safe; one object
    may be used by one process.

    What a store cannot do now it tries again for as long as it was opened for; `trouble` reports that meanwhile."""

    @property
    def directory(self) -> Path | None:
        """Where the files lie, when they are local ones; None when they must be fetched."""

    def read(self, key: str) -> memoryview:
        """The bytes of a file, mapped where possible; written to, they change in this process only.

        Raises `NotReadableError` when it is not there."""

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        """Bring a file here; `to` appears whole. Returns its bytes.

        n_bytes: that it must have; a file of another size takes no room here. None: whatever it has.

        Raises `NotReadableError`: it is not there, or has another size. `OSError`: it cannot be written here."""

    def probe(self, *, writing: bool) -> None:
        """Prove that the store can be read, and written where `writing`. Leaves nothing behind.

        Raises `WeightError` saying what is wrong and what to do."""

    def trouble(self) -> str:
        """Describe what is being tried again at this moment, for people; "" when nothing is."""


class Store(ReadableStore, Protocol):
    """A place for versions, as its owner sees it."""

    def stage(self, version: str, *, leads: bool = True) -> AbstractContextManager[Stage]:
        """Start to write a version, alone or with other processes.

        version: a new name (`version_name`), the same in all processes that write it. leads: one process does: it
        commits when all have written their files, or throws everything away. The others only create files, each of
        other names.

        Raises `WeightError`: the name is taken or not allowed, or the store refuses. `OSError`: a file system
        refuses."""

    def versions(self) -> list[str]:
        """Names of all visible versions, sorted."""

    def age(self, version: str) -> float:
        """Seconds since the version became visible; infinity when it is gone."""

    def delete(self, version: str) -> bool:
        """Remove a version. False when it was gone.

        A process that has mapped files of a local store keeps them."""

    def sweep(self, older_than: float, beginning: str = "") -> None:
        """Remove what writers and deleters that died left behind of versions whose names begin so, once it is
        `older_than` seconds old."""


def split_key(key: str) -> tuple[str, str]:
    """`<version>/<file>` in its parts. Raises `WeightError` for anything else: no key leaves a store."""
    parts = key.split("/")
    if len(parts) != 2 or not all(FILE_NAME.fullmatch(part) for part in parts):
        raise WeightError(f"{key!r} is not a key of a weight store (expected <version>/<file>)")
    return parts[0], parts[1]


def check_size(key: str, n_bytes: int, expected: int | None) -> None:
    """Raises `NotReadableError` for a file of another size than is expected."""
    if expected is not None and n_bytes != expected:
        raise NotReadableError(f"{key} has {n_bytes} bytes instead of {expected}")


def check_name(name: str, what: str) -> None:
    """Raises `WeightError` for what cannot be the name of a version or file."""
    if not FILE_NAME.fullmatch(name):
        raise WeightError(f"{name!r} cannot be the name of a {what} in a weight store")


def version_name(timeline: int, version: int, name: str) -> str:
    """A new name for a stored version. Raises `ValueError` for a `name` that may not stand in a path."""
    if name and not _OWNER.fullmatch(name):
        raise ValueError(f"name {name!r} may hold only letters, digits, '-' and '_'")
    return f"{name + '.' if name else ''}t{timeline}-v{version:08d}-{secrets.token_hex(8)}"


def owner_of(version: str) -> str | None:
    """The `name` under which a version was published; None when it is not one of ours."""
    match = _VERSION.fullmatch(version)
    return None if match is None else match["name"] or ""
