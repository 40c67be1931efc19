"""What an object store has of a directory that was uploaded to it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from policy_worker.checkpoints.uploads.s3 import MARKER
from tests.support.objects import ObjectStore


def check_uploaded(store: ObjectStore, bucket: str, prefix: str, path: Path) -> None:
    """Every file is there, byte for byte, the marker says so, and no upload is left half done."""
    files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    there = {key.removeprefix(f"{prefix}/") for key in store.keys(bucket) if key.startswith(f"{prefix}/")}
    assert {*files, MARKER} <= there, f"{prefix} is not complete"
    assert {name: store.read(bucket, f"{prefix}/{name}") for name in files} == files
    assert json.loads(store.read(bucket, f"{prefix}/{MARKER}"))["files"] == {
        name: {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()} for name, body in files.items()
    }
    under_way = store.client().list_multipart_uploads(Bucket=bucket, Prefix=prefix)
    assert under_way.get("Uploads", []) == []
