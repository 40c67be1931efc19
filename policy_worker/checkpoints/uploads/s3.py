"""To S3 and what speaks its language, through boto3: multipart, checked, resumed part by part.

    <prefix>/<run>/<step-…|final>/<file>           the files
    <prefix>/<run>/<step-…|final>/complete.json    the marker: names, sizes and sha256 of all files

    marker of other contents? remove it ─▶ each file: parts that are missing, then complete ─▶ marker, last

Credentials, region and endpoint come from the standard environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL, AWS_PROFILE, …), never from the configuration. Each part travels with boto3's checksum, which S3
verifies; a part that S3 lists is taken as sent only if its size and hash are those of the file's bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from policy_worker.checkpoints.uploads.upload_record import FileProgress, UploadRecord, files_in
from policy_worker.errors import SettingsError, UploadError, UploadStoppedError
from weight_sync.errors import StoreError
from weight_sync.stores.aws import code_of, complete, explain, head, is_passing, make_client
from weight_sync.stores.patience import USUAL, Delays, Patience
from weight_sync.stores.worker_pool import WorkerPool

log = logging.getLogger(__name__)

MARKER = "complete.json"
PART_BYTES = 16 * 1024 * 1024
"""A part: large enough that requests do not count, small enough that a lost one is soon sent again."""
MAX_PARTS = 10_000
"""S3's limit; larger files get larger parts."""
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True)
class UploadPart:
    """One part of a file; numbers start at 1, as S3's do."""

    number: int
    offset: int
    length: int


def part_bytes(size: int, wanted: int = PART_BYTES) -> int:
    """Bytes of a part of a file of this size, whole mebibytes where S3's limit on parts forces more than wanted."""
    least = math.ceil(size / MAX_PARTS)
    return wanted if least <= wanted else math.ceil(least / MEBIBYTE) * MEBIBYTE


def parts(size: int, length: int) -> list[UploadPart]:
    """The parts of a file."""
    return [
        UploadPart(number + 1, offset, min(length, size - offset))
        for number, offset in enumerate(range(0, size, length))
    ]


def object_prefix(prefix: str, run: str, name: str) -> str:
    """Return what the keys of one checkpoint begin with."""
    return "/".join([*filter(None, prefix.split("/")), run, name])


PARALLEL = 4
"""Parts on their way at once: fills a fast network, and holds no more than this many parts in memory."""
BUCKET_KEY = "train.ckpt.s3_bucket"
START_SECONDS = 30.0
"""How long a store may be away when training begins: a restart of its server must not end a job."""


class S3Target:
    """One bucket, below one prefix. Thread-safe."""

    name = "s3"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        run: str,
        stop: threading.Event,
        delays: Delays = USUAL,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.bucket, self._prefix, self._run, self._part_bytes = bucket, prefix, run, part_bytes
        try:
            self._client = make_client(PARALLEL)
        except StoreError as error:
            raise SettingsError(f"train.ckpt.upload_s3: {error}") from error
        # Parts on their way are waited for when the process leaves, too: `Patience` sees to it that they end.
        self._pool = WorkerPool(PARALLEL, threading.Event())
        self._patience = self._patience_of(stop, delays)
        brief = replace(delays, give_up=min(delays.give_up, START_SECONDS))
        self._at_start = self._patience_of(stop, brief)

    def _patience_of(self, stop: threading.Event, delays: Delays) -> Patience:
        return Patience(is_passing, self._explain, stop, delays, UploadError, UploadStoppedError)

    def place(self, name: str) -> str:
        """Where a directory of this name goes, for people."""
        return f"s3://{self.bucket}/{object_prefix(self._prefix, self._run, name)}/"

    # ---- before training ----------------------------------------------------------------------------------

    def probe(self) -> None:
        """Prove that the bucket is there and may be written to; leaves nothing in it.

        Raises `SettingsError`: naming key and remedy."""
        key = object_prefix(self._prefix, self._run, "probe")

        def look() -> None:
            self._client.head_bucket(Bucket=self.bucket)
            begun = self._client.create_multipart_upload(Bucket=self.bucket, Key=key)
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=begun["UploadId"])

        try:
            self._at_start.run("looking at the bucket", look)
        except UploadError as error:
            raise SettingsError(f'{BUCKET_KEY} = "{self.bucket}": {error}') from error

    # ---- one directory ------------------------------------------------------------------------------------

    def upload(self, path: Path, record: UploadRecord) -> None:
        """Send a directory, or what is missing of it.

        Raises `UploadError`: it failed for good. `UploadStoppedError`: the process leaves."""
        prefix, directory = object_prefix(self._prefix, self._run, path.name), path.stat()
        self._remove_other_marker(prefix, record.progress.stamp)
        for file in files_in(path):
            name = str(file.relative_to(path))
            key, progress = f"{prefix}/{name}", record.file_progress(name)
            if not (progress.done and self._is_there(key, file.stat().st_size, record.progress.stamp)):
                self._send_file(file, key, name, record)
        if not os.path.samestat(directory, path.stat()):
            raise UploadError(f"{path} was replaced while it was sent")
        self._write_marker(prefix, path, record)

    def _remove_other_marker(self, prefix: str, stamp: str) -> None:
        """Remove the marker of a timeline that was left: until all is replaced the copy is not complete."""
        key = f"{prefix}/{MARKER}"
        marker = self._head(key)
        if marker is not None and marker.get("Metadata", {}).get("stamp") != stamp:
            self._call(f"removing {key}", lambda: self._client.delete_object(Bucket=self.bucket, Key=key))

    def _write_marker(self, prefix: str, path: Path, record: UploadRecord) -> None:
        facts = {
            name: {"bytes": (path / name).stat().st_size, "sha256": progress.sha256}
            for name, progress in sorted(record.progress.files.items())
        }
        body = json.dumps({"run": self._run, "step": record.progress.step, "files": facts}, indent=1)
        self._put(f"{prefix}/{MARKER}", body.encode(), record.progress.stamp)

    def _put(self, key: str, body: bytes, stamp: str) -> None:
        self._call(
            f"sending {key}",
            lambda: self._client.put_object(Bucket=self.bucket, Key=key, Body=body, Metadata={"stamp": stamp}),
        )

    # ---- one file -----------------------------------------------------------------------------------------

    def _send_file(self, file: Path, key: str, name: str, record: UploadRecord) -> None:
        progress, size, stamp = record.file_progress(name), file.stat().st_size, record.progress.stamp
        if size <= self._part_bytes:
            body = file.read_bytes()
            progress.sha256 = hashlib.sha256(body).hexdigest()
            self._put(key, body, stamp)
        else:
            progress.sha256 = _sha256(file)
            self._send_parts(file, size, key, name, record)
        progress.done = True
        record.save()

    def _send_parts(self, file: Path, size: int, key: str, name: str, record: UploadRecord) -> None:
        progress = record.file_progress(name)
        arrived = self._arrived(key, progress)
        if arrived is None and self._is_there(key, size, record.progress.stamp):
            return  # completed by a process that was killed before it could note it
        if arrived is None:
            arrived = {}
            self._abort_others(key)
            progress.part_bytes, progress.etags = part_bytes(size, self._part_bytes), {}
            begun = self._call(f"beginning {key}", lambda: self._begin(key, record.progress.stamp))
            progress.upload_id = begun["UploadId"]
            record.save()
        all_parts = parts(size, progress.part_bytes)
        sent = {part.number: etag for part in all_parts if (etag := _same(file, part, arrived, progress))}
        missing = [part for part in all_parts if part.number not in sent]
        log.info("%s: %d of %d parts are to be sent", key, len(missing), len(all_parts))

        def send(part: UploadPart) -> str:
            etag = self._send_part(file, part, key, progress.upload_id)
            record.finished_part(name, part.number, etag)
            return etag

        etags = self._pool.each(send, missing)
        sent |= {part.number: etag for part, etag in zip(missing, etags, strict=True)}
        self._complete(key, size, record.progress.stamp, progress.upload_id, sent)

    def _begin(self, key: str, stamp: str) -> Any:
        return self._client.create_multipart_upload(Bucket=self.bucket, Key=key, Metadata={"stamp": stamp})

    def _send_part(self, file: Path, part: UploadPart, key: str, upload_id: str) -> str:
        body = _read(file, part)
        answer = self._call(
            f"sending part {part.number} of {key}",
            lambda: self._client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload_id, PartNumber=part.number, Body=body
            ),
        )
        return str(answer["ETag"])

    def _complete(self, key: str, size: int, stamp: str, upload_id: str, sent: dict[int, str]) -> None:
        listed = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(sent.items())]
        is_complete = partial(_is, size=size, stamp=stamp)
        self._call(
            f"completing {key}", lambda: complete(self._client, self.bucket, key, upload_id, listed, is_complete)
        )
        if not self._is_there(key, size, stamp):
            raise UploadError(f"{key}: {size} bytes were sent, and the store does not show them")

    def _arrived(self, key: str, progress: FileProgress) -> dict[int, tuple[int, str]] | None:
        """Size and ETag of the parts that S3 has, by number; None: the upload does not exist (any more)."""
        if not progress.upload_id:
            return None

        def list_parts() -> dict[int, tuple[int, str]] | None:
            pages = self._client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=key, UploadId=progress.upload_id
            )
            try:
                return {
                    part["PartNumber"]: (part["Size"], part["ETag"])
                    for page in pages
                    for part in page.get("Parts", [])
                }
            except self._client.exceptions.ClientError as error:
                if code_of(error) in ("NoSuchUpload", "404"):
                    return None
                raise

        arrived: dict[int, tuple[int, str]] | None = self._call(f"looking for the parts of {key}", list_parts)
        return arrived

    def _abort_others(self, key: str) -> None:
        """Parts of an upload that was begun and never noted are paid for until somebody removes them."""

        def abort() -> None:
            begun = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=key).get("Uploads", [])
            for upload in begun:
                if upload["Key"] == key:
                    self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload["UploadId"])

        try:
            self._call(f"looking for uploads of {key}", abort)
        except UploadError as error:
            log.warning("left-overs of earlier uploads could not be looked for: %s", error)

    def _head(self, key: str) -> Any | None:
        return self._call(f"reading {key}", lambda: head(self._client, self.bucket, key))

    def _is_there(self, key: str, size: int, stamp: str) -> bool:
        return _is(self._head(key), size, stamp)

    # ---- calls and their failures -------------------------------------------------------------------------

    def _call(self, what: str, work: Callable[[], Any]) -> Any:
        return self._patience.run(f"s3://{self.bucket}: {what}", work)

    def _explain(self, error: Exception) -> str:
        return explain(error, self._client, BUCKET_KEY)


def _is(facts: Any | None, size: int, stamp: str) -> bool:
    """Whether an object, as `head` finds it, is a file of this size of the directory with this stamp."""
    return facts is not None and facts["ContentLength"] == size and facts["Metadata"].get("stamp") == stamp


def _same(file: Path, part: UploadPart, arrived: dict[int, tuple[int, str]], progress: FileProgress) -> str | None:
    """The ETag of a part that S3 has and that is ours: as it was answered, or else the MD5 of its bytes."""
    size, etag = arrived.get(part.number, (-1, ""))
    if size != part.length:
        return None
    if progress.etags.get(part.number) == etag:
        return etag
    return etag if etag.strip('"') == hashlib.md5(_read(file, part), usedforsecurity=False).hexdigest() else None


def _read(file: Path, part: UploadPart) -> bytes:
    with file.open("rb") as stream:
        stream.seek(part.offset)
        return stream.read(part.length)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
