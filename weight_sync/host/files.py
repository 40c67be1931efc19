"""The files of a host copy: one version of the weights as safetensors files that are changed in place.

    <directory>/             of this user alone
      users.lock             shared while a process has the copy open
      fetching.lock          exclusive: fetching and advancing
      content.lock           shared: reading the data files; exclusive: changing them
      state.json             what the data files hold, and how it is proven
      advancing.json         from before the data files are changed until state.json says so
      w-<hex>/*.safetensors  the data files
      fetched/<version>/…    deltas of a store that is not a local directory

Invariant: where `advancing.json` is not there, the data files hold exactly what `state.json` says. Where it is there
and begins at the state's content, someone died between: the data files hold that content with some of the named
deltas written over some of it, and all of them written over it once more lead to the right bits.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schema.util.atomic_file import write_text
from schema.wire.frame import FrameError, read_header
from schema.wire.weights import ChainLink, Piece, Publication, TensorEntry
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.host.locks import locked
from weight_sync.layout import as_tensor, size_of, torch_dtype

USERS, FETCHING, CONTENT = "users.lock", "fetching.lock", "content.lock"
STATE, ADVANCING, FETCHED = "state.json", "advancing.json", "fetched"
LOCK_TIMEOUT = 1800.0
"""Seconds. The holder of a lock fetches or loads gigabytes, and the kernel releases the lock of a dead process."""


class CacheError(WeightError):
    """This host has no place for a copy of the weights: says where, why, and what to do. No other version helps."""


class CopyState(BaseModel):
    """The version that the data files hold."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # other builds say more

    format: Literal[1] = 1
    folder: str = Field(pattern=r"^w-[0-9a-f]+$", description="Of the data files.")
    content_hash: str
    tensors: dict[str, TensorEntry]
    proven: bool = Field(description="Whether the bytes were hashed since a process last had the copy open.")
    publication: Publication | None = Field(description="The newest one with this content, of this job's life.")
    checked: Annotated[
        list[ChainLink],
        Field(
            description="Deltas that were applied one after the other and whose results were hashed, up to this "
            "content; of those applied in one go only the last link has its content hash, the others have none."
        ),
    ] = []
    kept: Annotated[list[Piece], Field(description="Fetched deltas, oldest first.")] = []


class Advancing(BaseModel):
    """A change of the data files that has begun."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str = Field(description="Content hash before.")
    target: str = Field(description="Content hash after.")
    uris: list[str] = Field(description="Manifests of the deltas, in order.")
    publication: Publication | None = Field(description="That it leads to; null: not known.")


def read_state(directory: Path) -> CopyState | None:
    """The state; None where there is none, or none that this build wrote."""
    try:
        return CopyState.model_validate_json((directory / STATE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def read_advancing(directory: Path, state: CopyState) -> Advancing | None:
    """The change that was begun on top of this state and not finished, if any."""
    try:
        advancing = Advancing.model_validate_json((directory / ADVANCING).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:  # from a build that wrote other things: anything may have been changed
        return Advancing(base=state.content_hash, target="", uris=[], publication=None)
    return advancing if advancing.base == state.content_hash != advancing.target else None


def write_model(path: Path, model: BaseModel) -> None:
    """Write it whole: readers see the old text or the new one. Raises `OSError`."""
    write_text(path, model.model_dump_json(), mode=0o600)


def own_directory(path: Path) -> None:
    """Make a directory for this user alone, or make sure that it is one.

    Raises `CacheError` when it is a link, or another user's; `OSError` when it cannot be made."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise CacheError(
            f"{path} must be a directory that only user {os.geteuid()} can enter, found mode "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}: remove it, or set weight_sync.host_cache to "
            f"another directory"
        )


def bytes_of(state: CopyState) -> int:
    """Count the bytes of all tensors."""
    return sum(size_of(name, torch_dtype(entry.dtype, name), entry.shape) for name, entry in state.tensors.items())


# ---- data files ------------------------------------------------------------------------------------------------


def map_tensors(directory: Path, state: CopyState, *, writable: bool) -> dict[str, memoryview]:
    """The bytes of all tensors.

    writable: what is written reaches the files; otherwise it stays with the writer.

    Raises `NotReadableError`: a file is missing or not as the state says. `CacheError`: files cannot be mapped here.
    """
    tensors: dict[str, memoryview] = {}
    by_file: dict[str, list[str]] = {}
    for name, entry in state.tensors.items():
        by_file.setdefault(entry.file, []).append(name)
    for file, names in by_file.items():
        data = _mapped(directory / state.folder / file, writable)
        try:
            header = read_header(data)
        except FrameError as error:
            raise NotReadableError(f"{directory / state.folder / file} is damaged: {error}") from None
        for name in names:
            entry, place = state.tensors[name], header.entries.get(name)
            size = size_of(name, torch_dtype(entry.dtype, name), entry.shape)
            if place is None or (place.dtype, list(place.shape)) != (entry.dtype, entry.shape):
                raise NotReadableError(f"tensor {name!r} is not in {directory / state.folder / file}")
            tensors[name] = data[header.body + place.start : header.body + place.start + size]
    return tensors


def inodes(directory: Path, state: CopyState) -> dict[str, tuple[int, int]]:
    """Identify the data files by device and inode. Raises `NotReadableError` when one is missing: files of temporary
    directories are removed by their age, even while they are in use."""
    inode_by_file: dict[str, tuple[int, int]] = {}
    for file in sorted({entry.file for entry in state.tensors.values()}):
        path = directory / state.folder / file
        try:
            status = path.lstat()
        except OSError as error:
            raise NotReadableError(f"{path}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise NotReadableError(f"{path} is not a file")
        inode_by_file[file] = status.st_dev, status.st_ino
    return inode_by_file


class WritableTensors:
    """The data files of a copy mapped to be changed, kept from one advance to the next: the page faults of a fresh
    mapping cost more than writing over it. For one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = ""
        self._data: dict[str, memoryview] = {}
        self._inodes: dict[str, tuple[int, int]] = {}

    def of(self, state: CopyState) -> dict[str, memoryview]:
        """Return tensors as `map_tensors` does."""
        self.keep_only(state)
        if state.folder != self._folder:
            self._inodes = inodes(self._directory, state)
            self._data, self._folder = map_tensors(self._directory, state, writable=True), state.folder
        return self._data

    def check(self, state: CopyState) -> None:
        """Raises `NotReadableError` when data files are missing, or are no longer those that are mapped: what is
        written would reach nobody."""
        if inodes(self._directory, state) != self._inodes and state.folder == self._folder:
            raise NotReadableError(f"files of {self._directory / state.folder} were replaced by others")

    def keep_only(self, state: CopyState | None) -> None:
        """Let go of files that others have replaced: they take memory as long as they are mapped."""
        if state is None or state.folder != self._folder:
            self.forget()

    def forget(self) -> None:
        """Map anew when asked next."""
        self._data, self._folder, self._inodes = {}, "", {}


def _mapped(path: Path, writable: bool) -> memoryview:
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotReadableError(f"{path}: {error.strerror}") from error
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
        return memoryview(mmap.mmap(descriptor, 0, access=access))
    except ValueError as error:
        raise NotReadableError(f"{path} cannot be mapped: {error}") from error
    except OSError as error:  # another copy of the bytes would not help
        raise CacheError(
            f"{path} cannot be mapped into memory: {error.strerror}. Raise the limit of address space (ulimit -v), "
            f"or set weight_sync.host_cache to a directory of a local file system"
        ) from error
    finally:
        os.close(descriptor)


class CopyView:
    """The weights that a host copy holds, while its shared lock is held."""

    def __init__(self, directory: Path, state: CopyState) -> None:
        self._directory, self._state = directory, state
        self.content_hash, self.publication = state.content_hash, state.publication

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All names and tensors: views of mapped files, valid until the lock is released."""
        data = map_tensors(self._directory, self._state, writable=False)
        for name, entry in self._state.tensors.items():
            yield name, as_tensor(data[name], torch_dtype(entry.dtype, name), entry.shape)


@contextmanager
def open_copy(
    directory: Path, *, timeout: float = LOCK_TIMEOUT, stop: threading.Event | None = None
) -> Iterator[CopyView]:
    """Read the copy from any process of this host; it does not change meanwhile.

    Raises:
        StoppedError: `stop` was set.
        LockTimeoutError: it is being changed for longer than `timeout` seconds.
        NotReadableError: no whole version is there: none yet, whoever changed it died and nobody repeated it, data
            files are gone, or nobody has hashed it since a process came that believed to be the first one.
    """
    if not directory.is_dir():
        raise NotReadableError(f"{directory} is not there")
    with locked(directory / CONTENT, exclusive=False, timeout=timeout, stop=stop):
        state = read_state(directory)
        if state is None:
            raise NotReadableError(f"{directory} holds no weights")
        if read_advancing(directory, state) is not None:
            raise NotReadableError(
                f"{directory} is torn: the process that changed it died, and the change has not been repeated yet"
            )
        if not state.proven:
            raise NotReadableError(f"{directory} was left by earlier processes and has not been hashed yet")
        inodes(directory, state)
        yield CopyView(directory, state)
