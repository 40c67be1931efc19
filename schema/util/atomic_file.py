"""Files and directories that are whole or absent: written next to their place, renamed at the end.

`replacing` and `replacing_directory` yield a hidden neighbour to fill. A reader sees the old content or the new one,
never a half of it; a writer that is killed leaves the neighbour behind (`.<name>.<random>`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A file to write, which takes the place of what is at `path` at the end of the block.

    durable: it survives a power failure, too.

    Raises:
        OSError: what was there is there.
    """
    neighbour = _neighbour(path)
    try:
        yield neighbour
        if durable:
            sync(neighbour)
        os.replace(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def write_text(path: Path, text: str, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write a file in UTF-8. The umask takes its part of `mode`. Raises `OSError`; then what was there is there."""
    with replacing(path, durable=durable) as neighbour:
        descriptor = os.open(neighbour, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Whatever the block writes to `path` gets the mode of any new file there: safetensors makes it 0600.

    Raises:
        OSError: the file cannot be made.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


@contextmanager
def replacing_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of what is at `target` at the end of the block, on disk.

    Raises:
        OSError: what was there is there.
    """
    neighbour = _neighbour(target)
    neighbour.mkdir(parents=True)
    try:
        yield neighbour
        put_in_place(neighbour, target, neighbour.with_name(f"{neighbour.name}.old"))
    finally:
        shutil.rmtree(neighbour, ignore_errors=True)


def remove_unfinished(target: Path) -> None:
    """Delete what killed writers of `target` have left. Only where no other process writes it."""
    for path in target.parent.glob(f".{target.name}.*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def put_in_place(finished: Path, target: Path, old: Path) -> None:
    """Give a finished directory its name, once it is on disk; what has that name makes room and is deleted.

    old: where that stands for a moment; all three lie in one directory.

    Raises:
        OSError: what was there is there.
    """
    sync_tree(finished)
    replaces = os.path.lexists(target)
    if replaces:
        os.rename(target, old)
    try:
        os.rename(finished, target)
    except OSError:
        if replaces:
            os.rename(old, target)
        raise
    sync(target.parent)
    if replaces and old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    elif replaces:
        old.unlink(missing_ok=True)


def sync_tree(directory: Path) -> None:
    """Force all files and directories below to disk. Raises `OSError`."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Force a file or directory to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _neighbour(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")
