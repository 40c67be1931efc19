"""Stores of both kinds for tests: a directory, and a bucket of moto's server with quick pauses."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping

import pytest

from schema.wire.store_url import S3Location
from weight_sync.stores import Store
from weight_sync.stores.base import Stage
from weight_sync.stores.patience import Delays
from weight_sync.stores.s3 import S3Store

BUCKET = "cosmos-weights"
QUICK = Delays(give_up=20.0, first=0.01, most=0.1)
NAME = "job.t0-v00000001-0123456789abcdef"
OTHER = "job.t0-v00000002-0123456789abcdef"


def use(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients that are made from now on find a store, and nothing of this machine's settings."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def bucket(
    prefix: str,
    *,
    name: str = BUCKET,
    delays: Delays = QUICK,
    stop: threading.Event | None = None,
    read_timeout: float = 20.0,
) -> S3Store:
    return S3Store(S3Location(name, prefix), stop=stop, delays=delays, read_timeout=read_timeout)


def pattern(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes whose every block of 64 KiB is another."""
    return b"".join(
        hashlib.sha256(f"{seed}:{block}".encode()).digest() * 2048 for block in range(n_bytes // 65536 + 1)
    )[:n_bytes]


def put_file(stage: Stage, name: str, data: bytes) -> None:
    with stage.create(name) as stream:
        stream.write(data)


def write(store: Store, version: str, files: Mapping[str, bytes], *, leads: bool = True) -> None:
    """A version of these files, and a manifest where one leads."""
    with store.stage(version, leads=leads) as stage:
        for file, data in files.items():
            put_file(stage, file, data)
        if leads:
            put_file(stage, "manifest.json", b"{}")
            stage.commit()
