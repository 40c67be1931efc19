"""Which names are paths of this machine, and what stands there."""

from __future__ import annotations

import re
from pathlib import Path

DATA_SUFFIXES = (".parquet", ".jsonl", ".json")

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def local_path(name: str) -> Path | None:
    """The path that a dataset or model name means, `~` resolved; None for a name on the hub.

    A name is a path when it begins like one (`/`, `./`, `../`, `~`), ends like a data file, cannot be a name
    on the hub, or when something of that name exists, relative to the current directory.
    """
    if name.startswith("~"):
        return _expanded(name)
    looks_like_path = name.startswith(("/", "./", "../")) or name in (".", "..")
    is_data = name.endswith(DATA_SUFFIXES)
    if looks_like_path or is_data or not _HUB_NAME.match(name) or exists(Path(name)):
        return Path(name)
    return None


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no home directory, or no such user: the path as written does not exist
        return Path(name)


def exists(path: Path) -> bool:
    """Whether something is there; what the system cannot even look up (too long, a NUL) is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def data_files(directory: Path) -> list[Path]:
    """The data files of a dataset directory, sorted by name."""
    return sorted(path for path in directory.iterdir() if path.suffix in DATA_SUFFIXES and path.is_file())
