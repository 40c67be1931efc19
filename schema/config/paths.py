"""Which names are paths of this machine, and what stands there."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

_TABLES, _TEXTS = (".parquet", ".arrow"), (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
DATA_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".arrow", ".csv", ".tsv")
"""Endings of data files. Of files with the same name, the format that stands first is read."""
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
"""Endings that may follow the ending of a text format."""
DATA_FORMATS = f"{', '.join(DATA_SUFFIXES)} ({', '.join(_TEXTS)} also with {', '.join(COMPRESSIONS)} behind)"
_TEXT, _COMPRESSED, _TABLE = ("|".join(map(re.escape, endings)) for endings in (_TEXTS, COMPRESSIONS, _TABLES))
_DATA_SUFFIX = re.compile(rf".+?((?:{_TEXT})(?:{_COMPRESSED})?|{_TABLE})", re.IGNORECASE | re.DOTALL)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")


def data_suffix(name: str) -> str:
    """The ending of a data file in small letters, with that of its compression (`.jsonl.gz`); "": it has none."""
    match = _DATA_SUFFIX.fullmatch(name.rpartition("/")[2])
    return match[1].lower() if match else ""


def local_path(name: str) -> Path | None:
    """The path that a dataset or model name means; None for a name on the Hugging Face hub.

    A name is a path when it begins like one (`/`, `./`, `../`, `~`), ends like a data file, cannot be a name
    on the hub, or when something of that name exists, relative to the current directory.
    """
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    is_data = bool(data_suffix(name))
    if looks_like_path or is_data or not _HUB_NAME.fullmatch(name) or exists(Path(name)):
        return Path(name)
    return None


_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_COPIES = {
    "hdfs": "hdfs dfs -get {} DIR",
    "s3": "aws s3 cp --recursive {} DIR",
    "oss": "ossutil cp -r {} DIR",
    "gs": "gcloud storage cp -r {} DIR",
}


def address_fault(name: str, what: str) -> tuple[str, str] | None:
    """(message, remedy) for a name that is an address (`hdfs://…`), which no data or model is read from; else None.

    what: what is read, as the subject of a sentence: `data is`.
    """
    match = _ADDRESS.fullmatch(name)
    if match is None:
        return None
    scheme, path = match[1].lower(), match[2]
    message = f"{name} is an address, and {what} read from paths of this machine"
    if scheme == "file":
        return message, f"write the path: {path}"
    if scheme == "hf":
        return message, "write the name on the hub: owner/name"
    command = f": {_COPIES[scheme].format(name)}" if scheme in _COPIES else ""
    places = "data and models may also be names on the Hugging Face hub"
    return (message, f"copy or mount it where all machines of the job see it, and name that path{command}; {places}")


def exists(path: Path) -> bool:
    """Whether something is there; what the system cannot even look up (too long, a NUL) is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a file is there, by the same rule."""
    return exists(path) and path.is_file()


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file: a pipe may block for ever, a device may never end.

    Raises OSError, ValueError: not there, not a regular file, larger than `most` bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise NotAFileError(f"{'a pipe' if stat.S_ISFIFO(mode) else 'a device'}, not a file")
        with open(handle, "rb", closefd=False) as file:  # which refuses a directory
            data = file.read(most + 1)  # its size may change, and is 0 below /proc
    finally:
        os.close(handle)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return data


class NotAFileError(ValueError):
    """A pipe or a device."""


def home_hint(name: str) -> str:
    """The remedy for a path that begins with `~`, which only a shell would expand; "" for any other."""
    if not name.startswith("~"):
        return ""
    try:
        return f"write it out, `~` is not expanded: {Path(name).expanduser()}"
    except RuntimeError:  # no home directory, or no such user
        return "write it out, `~` is not expanded"
