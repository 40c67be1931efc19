"""Where versions lie: one protocol, and the stores that keep it."""

from __future__ import annotations

import os
import threading

from schema.wire.store_url import is_url
from weight_sync.stores.base import (
    FILE_NAME,
    HEAD_BYTES,
    MANIFEST,
    ReadableStore,
    Stage,
    Store,
    owner_of,
    split_key,
    version_name,
)
from weight_sync.stores.directory import DirectoryStore

TIMEOUT = 1800.0
"""Seconds, as `weight_sync.store_timeout` unless it is set."""

__all__ = [
    "FILE_NAME",
    "HEAD_BYTES",
    "MANIFEST",
    "TIMEOUT",
    "DirectoryStore",
    "ReadableStore",
    "Stage",
    "Store",
    "open_store",
    "owner_of",
    "split_key",
    "version_name",
]


def open_store(
    place: str | os.PathLike[str], *, timeout: float = TIMEOUT, stop: threading.Event | None = None
) -> Store:
    """The store at a place: `s3://bucket/prefix`, or the path of a directory.

    timeout: seconds for which each request that fails is tried again, where the store is a remote one. stop: set when
    the process leaves; a wait for a remote store then raises `StoppedError`.

    Raises `StoreError` for another URL, or when the environment's settings make no client."""
    if isinstance(place, str) and is_url(place):
        from weight_sync.stores.s3 import open_s3  # boto3 takes its time to import

        return open_s3(place, timeout, stop)
    return DirectoryStore(place)
