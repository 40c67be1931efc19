"""Where versions lie: one protocol, and the stores that keep it."""

from __future__ import annotations

import os

from weight_sync.stores.base import (
    FILE_NAME,
    HEAD_BYTES,
    MANIFEST,
    Stage,
    Store,
    owner_of,
    split_key,
    version_name,
)
from weight_sync.stores.directory import DirectoryStore

__all__ = [
    "FILE_NAME",
    "HEAD_BYTES",
    "MANIFEST",
    "DirectoryStore",
    "Stage",
    "Store",
    "open_store",
    "owner_of",
    "split_key",
    "version_name",
]


def open_store(place: str | os.PathLike[str]) -> Store:
    """The store at a place: the path of a directory."""
    return DirectoryStore(place)
