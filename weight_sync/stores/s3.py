"""The store in a bucket: S3 and what speaks its language.

    s3://bucket/prefix/<version>/<file>            written first, by one process or several
                       <version>/manifest.json     written last: without it no version exists

Versions are made visible by their manifest and removed beginning with it. Keys have exactly these two parts below the
prefix; anything else there is not ours and never listed, read or removed, and neither are unfinished
versions whose names are not those of weight versions.

Requests are tried again, with pauses, for as long as the store was opened for; what waiting does not mend is an error
at once. Large objects travel in parts, `PARALLEL` at once over all threads of a process: about `PARALLEL` + 2 times
16 MiB for each file that is being written or read into memory.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from schema.util.atomic_file import replacing
from schema.wire.store_url import S3Location, parse_url
from weight_sync.errors import NotReadableError, StoppedError, StoreError, WeightError
from weight_sync.stores.aws import MISSING, READ_S, CutError, code_of, explain, head, is_passing, make_client
from weight_sync.stores.base import FILE_NAME, MANIFEST, check_name, check_size, owner_of, split_key
from weight_sync.stores.patience import Delays, Patience
from weight_sync.stores.upload import PART_BYTES, Upload
from weight_sync.stores.worker_pool import WorkerPool

T = TypeVar("T")
log = logging.getLogger(__name__)

STORE_KEY = "weight_sync.store"
PARALLEL = 4
"""Requests on their way at once: fills a fast network, and holds no more than this many parts in memory."""
USUAL = Delays(give_up=1800.0, first=0.5, most=30.0)
BRIEF = 5.0
"""Seconds for tidying up behind a version that failed: what then stays is swept later."""
START_SECONDS = 30.0
"""How long a store may be away when a process begins: a restart of its server does not have to end a job."""
PAGE = 1000
"""Keys of one listing, S3's most."""
_EMPTY = ("InvalidRange", "416")
_CHANGED = ("PreconditionFailed", "412")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True)
class _Found:
    """An object of a listing."""

    file: str
    age: float


class _S3Stage:
    def __init__(self, store: S3Store, version: str, leads: bool) -> None:
        self._store, self._version, self._leads = store, version, leads
        self._manifest: bytes | None = None
        self.committed = False

    @contextmanager
    def create(self, file: str) -> Iterator[IO[bytes]]:
        check_name(file, "file")
        if file == MANIFEST:  # its arrival is what makes the version visible
            text = io.BytesIO()
            yield text
            self._manifest = text.getvalue()
            return
        upload = Upload(self._store, self._store.key_of(self._version, file))
        try:
            yield cast(IO[bytes], upload)
            upload.complete()
        except BaseException:
            self._store.abandon(upload)
            raise

    def commit(self) -> None:
        if not self._leads:
            raise WeightError(f"version {self._version} is made visible by the process that leads")
        if self._manifest is None:
            raise WeightError(f"version {self._version} has no {MANIFEST}, and would never be visible")
        self._store.put(self._store.key_of(self._version, MANIFEST), self._manifest)
        self.committed = True


class S3Store:
    """A `Store` in one bucket, below one prefix.

    place: bucket and prefix. stop: set when the process leaves: a wait then raises `StoppedError`. delays: how long a
    request is tried again. read_timeout: seconds without a byte that end an attempt.

    Raises `StoreError` when the environment's settings make no client."""

    def __init__(
        self,
        place: S3Location,
        *,
        stop: threading.Event | None = None,
        delays: Delays = USUAL,
        read_timeout: float = READ_S,
    ) -> None:
        self.place, self.bucket = place, place.bucket
        self.client = make_client(PARALLEL, read_timeout)
        self._stop = stop if stop is not None else threading.Event()
        self.pool = WorkerPool(PARALLEL, self._stop)
        self._patience = self._patience_of(delays)
        self._brief = self._patience_of(replace(delays, give_up=min(BRIEF, delays.give_up)))
        self._at_start = self._patience_of(replace(delays, give_up=min(START_SECONDS, delays.give_up)))

    def _patience_of(self, delays: Delays) -> Patience:
        def words(error: Exception) -> str:
            return explain(error, self.client, STORE_KEY)

        return Patience(is_passing, words, self._stop, delays, StoreError, StoppedError)

    def __repr__(self) -> str:
        return f"S3Store({str(self.place)!r})"

    @property
    def directory(self) -> None:
        return None

    def trouble(self) -> str:
        return self._patience.trouble() or self._at_start.trouble()

    # ---- requests -----------------------------------------------------------------------------------------

    def patiently(self, what: str, work: Callable[[], T]) -> T:
        """The result of one request, tried again in the calling thread. Raises `StoreError`, `StoppedError`."""
        return self._patience.run(f"s3://{self.bucket}: {what}", work)

    def request(self, what: str, work: Callable[[], T]) -> T:
        """The same in a worker."""
        return self.pool.run(lambda: self.patiently(what, work))

    def key_of(self, version: str, file: str = "") -> str:
        """The key of a file; without one, what all keys of the version begin with."""
        return f"{self.place.prefix}/{version}/{file}".lstrip("/")

    def put(self, key: str, body: bytes) -> None:
        """Write a small object. Raises `StoreError`."""
        self.request(f"writing {key}", lambda: self.client.put_object(Bucket=self.bucket, Key=key, Body=body))

    # ---- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, version: str, *, leads: bool = True) -> Iterator[_S3Stage]:
        check_name(version, "version")
        if leads and self.age(version) < float("inf"):
            raise WeightError(f"version {self.place}/{version} exists already: versions are never overwritten")
        stage = _S3Stage(self, version, leads)
        try:
            yield stage
        finally:
            if leads and not stage.committed:
                self._throw_away(version)

    def _throw_away(self, version: str) -> None:
        try:
            self._remove(version, self._files(version, self._brief), self._brief)
            self._abort(lambda name, _: name == version, self._brief)
        except StoppedError:
            log.info("version %s was not finished: the process leaves", version)
        except WeightError as error:
            log.warning("what was written of version %s stays until it is swept: %s", version, error)

    def abandon(self, upload: Upload) -> None:
        """Let a file not be written; its parts are paid for until somebody removes them."""
        if not upload.upload_id or self._stop.is_set():
            return
        try:
            self.pool.run(lambda: self._abort_one(upload.key, upload.upload_id, self._brief))
        except WeightError as error:
            log.warning("parts of %s stay until they are swept: %s", upload.key, error)

    def _abort_one(self, key: str, upload_id: str, patience: Patience) -> None:
        def abort() -> None:
            try:
                self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)
            except self.client.exceptions.ClientError as error:
                if code_of(error) not in ("NoSuchUpload", *MISSING):
                    raise

        patience.run(f"s3://{self.bucket}: ending the upload of {key}", abort)

    # ---- reading ------------------------------------------------------------------------------------------

    def read(self, key: str) -> memoryview:
        first = self._first(key)
        if first.size == len(first.body):
            return memoryview(bytearray(first.body))
        data = memoryview(bytearray(first.size))

        def keep(offset: int, body: bytes) -> None:
            data[offset : offset + len(body)] = body

        keep(0, first.body)
        self._rest(first, keep)
        return data

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        first = self._first(key)
        check_size(f"{self.place}/{key}", first.size, n_bytes)
        with replacing(to) as temporary, temporary.open("xb", buffering=0) as file:
            if first.size:
                os.posix_fallocate(file.fileno(), 0, first.size)  # a full disk shows before the transfer

            def keep(offset: int, body: bytes) -> None:
                view = memoryview(body)
                while view:
                    # Asked each time: when the process leaves, workers outlive the file, and its number.
                    n = os.pwrite(file.fileno(), view, offset)
                    offset, view = offset + n, view[n:]

            keep(0, first.body)
            self._rest(first, keep)
        return first.size

    def _first(self, key: str) -> _First:
        """The beginning of an object, and what it is. Raises `NotReadableError` when there is none."""
        version, file = split_key(key)
        full = self.key_of(version, file)
        first = self.request(f"reading {full}", lambda: self._get(full, 0, PART_BYTES, {}))
        if first is None:
            raise NotReadableError(f"{self.place}/{key}: no such object (collected, or not visible yet?)")
        return first

    def _rest(self, first: _First, keep: Callable[[int, bytes], None]) -> None:
        def bring(offset: int) -> None:
            part = self.patiently(
                f"reading {first.key} from byte {offset}",
                lambda: self._get(first.key, offset, PART_BYTES, {"IfMatch": first.etag}),
            )
            expected = min(PART_BYTES, first.size - offset)
            if part is None or (part.size, len(part.body)) != (first.size, expected):
                raise NotReadableError(f"s3://{self.bucket}/{first.key} was changed or removed while it was read")
            keep(offset, part.body)

        self.pool.each(bring, range(len(first.body), first.size, PART_BYTES))

    def _get(self, key: str, offset: int, length: int, condition: dict[str, str]) -> _First | None:
        """A range of an object, shorter where the object ends; None: no such object exists."""
        try:
            answer = self.client.get_object(
                Bucket=self.bucket, Key=key, Range=f"bytes={offset}-{offset + length - 1}", **condition
            )
        except self.client.exceptions.ClientError as error:
            if code_of(error) in _EMPTY and offset == 0:
                return _First(key, 0, "", b"")
            if code_of(error) in (*MISSING, *_CHANGED, *_EMPTY):
                return None
            raise
        with answer["Body"] as stream:
            body: bytes = stream.read()
        announced, size = _range_of(answer)
        if len(body) != announced:
            raise CutError(f"{len(body)} bytes of {announced}")
        return _First(key, size, str(answer["ETag"]), body)

    # ---- what is there ------------------------------------------------------------------------------------

    def versions(self) -> list[str]:
        files_by_version = self.pool.run(lambda: self._list("", self._patience))
        return sorted(
            version for version, files in files_by_version.items() if any(file.file == MANIFEST for file in files)
        )

    def age(self, version: str) -> float:
        check_name(version, "version")
        key = self.key_of(version, MANIFEST)

        def look() -> float:
            answer = head(self.client, self.bucket, key)
            if answer is None:
                return float("inf")
            age: float = (_clock(answer) - answer["LastModified"]).total_seconds()
            return max(0.0, age)

        return self.request(f"looking at {key}", look)

    def _files(self, version: str, patience: Patience) -> list[_Found]:
        return self.pool.run(lambda: self._list(version, patience)).get(version, [])

    def _list(self, beginning: str, patience: Patience) -> dict[str, list[_Found]]:
        """All files by version, of versions whose names begin so (or with a whole name). In the calling thread."""
        prefix = self.key_of(beginning).removesuffix("/") if beginning else self._below()
        files_by_version: dict[str, list[_Found]] = {}
        request = partial(self.client.list_objects_v2, Prefix=prefix, MaxKeys=PAGE)
        for answer in self._pages(f"listing {prefix}", request, patience, ("ContinuationToken",)):
            now = _clock(answer)
            for entry in answer.get("Contents", []):
                parts = self._parts_of(entry["Key"])
                if parts is not None:
                    age = (now - entry["LastModified"]).total_seconds()
                    files_by_version.setdefault(parts[0], []).append(_Found(parts[1], age))
        return files_by_version

    def _pages(
        self, what: str, request: Callable[..., Any], patience: Patience, markers: tuple[str, ...]
    ) -> Iterator[Any]:
        """All answers of a listing. markers: arguments for the next page, in each answer as `Next…`."""
        after: dict[str, str] = {}
        while True:
            answer = patience.run(f"s3://{self.bucket}: {what}", partial(request, Bucket=self.bucket, **after))
            yield answer
            if not answer.get("IsTruncated"):
                return
            after = {marker: answer.get(f"Next{marker}", "") for marker in markers}

    def _below(self) -> str:
        return f"{self.place.prefix}/" if self.place.prefix else ""

    def _parts_of(self, key: str) -> tuple[str, str] | None:
        """Version and file of a key; None for what is none of a store."""
        parts = key.removeprefix(self._below()).split("/")
        if len(parts) != 2 or not all(FILE_NAME.fullmatch(part) for part in parts):
            return None
        return parts[0], parts[1]

    # ---- removing -----------------------------------------------------------------------------------------

    def delete(self, version: str) -> bool:
        check_name(version, "version")
        files = self._files(version, self._patience)
        if not any(file.file == MANIFEST for file in files):
            return False
        self._remove(version, files, self._patience)
        return True

    def _remove(self, version: str, files: Iterable[_Found], patience: Patience) -> None:
        """Remove files of a version, its manifest before anything else."""

        def remove(file: str) -> None:
            key = self.key_of(version, file)
            patience.run(
                f"s3://{self.bucket}: removing {key}", lambda: self.client.delete_object(Bucket=self.bucket, Key=key)
            )

        names = {file.file for file in files}
        if MANIFEST in names:
            self.pool.run(lambda: remove(MANIFEST))
        self.pool.each(remove, sorted(names - {MANIFEST}))

    def sweep(self, older_than: float, beginning: str = "") -> None:
        def is_ours(version: str) -> bool:
            return version.startswith(beginning) and owner_of(version) is not None

        files_by_version = self.pool.run(lambda: self._list(beginning, self._patience))
        for version, files in files_by_version.items():
            unfinished = all(file.file != MANIFEST for file in files)
            if unfinished and is_ours(version) and min(file.age for file in files) >= older_than:
                self._remove(version, files, self._patience)
        self._abort(lambda version, age: is_ours(version) and age >= older_than, self._patience)

    def _abort(self, wanted: Callable[[str, float], bool], patience: Patience) -> None:
        """End the uploads of versions for which `wanted(version, age in seconds)`."""
        uploads = self.pool.run(lambda: list(self._uploads(patience)))
        chosen = [(key, upload_id) for key, version, upload_id, age in uploads if wanted(version, age)]
        self.pool.each(lambda upload: self._abort_one(*upload, patience), chosen)

    def _uploads(self, patience: Patience) -> Iterator[tuple[str, str, str, float]]:
        """Key, version, id and age of the multipart uploads that are under way. In the calling thread."""
        request = partial(self.client.list_multipart_uploads, Prefix=self._below(), MaxUploads=PAGE)
        for answer in self._pages("listing uploads", request, patience, ("KeyMarker", "UploadIdMarker")):
            now = _clock(answer)
            for entry in answer.get("Uploads", []):
                parts = self._parts_of(entry["Key"])
                if parts is not None:
                    age = (now - entry["Initiated"]).total_seconds()
                    yield entry["Key"], parts[0], entry["UploadId"], age

    # ---- before anything --------------------------------------------------------------------------------

    def probe(self, *, writing: bool) -> None:
        key = f"{self._below()}.probe-{secrets.token_hex(8)}"

        def look() -> None:
            self.client.list_objects_v2(Bucket=self.bucket, Prefix=self._below(), MaxKeys=1)
            if writing:
                self.client.put_object(Bucket=self.bucket, Key=key, Body=b"probe")
            self._get(key, 0, PART_BYTES, {})
            if writing:
                self.client.delete_object(Bucket=self.bucket, Key=key)

        doing = "written" if writing else "read"
        try:
            self.pool.run(lambda: self._at_start.run("looking at the bucket", look))
        except StoreError as error:
            raise StoreError(f"{self.place} cannot be {doing}: {error}") from error


@dataclass(frozen=True)
class _First:
    """Bytes of an object from an offset, and the size of the whole."""

    key: str
    size: int
    etag: str
    body: bytes


def _range_of(answer: Any) -> tuple[int, int]:
    """Bytes that an answer should have, and bytes of the whole object."""
    match = _RANGE.fullmatch(answer.get("ContentRange", ""))
    if match is None:  # a store that knows no ranges answers with the whole
        return int(answer["ContentLength"]), int(answer["ContentLength"])
    begin, end, size = (int(number) for number in match.groups())
    return end - begin + 1, size


def _clock(answer: Any) -> datetime:
    """The store's own time, by which it dates objects."""
    text = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(text) if text else datetime.now(UTC)


def open_s3(url: str, timeout: float, stop: threading.Event | None) -> S3Store:
    """The store at an URL. Raises `StoreError` for one that is none, or an environment that makes no client."""
    try:
        place = parse_url(url)
    except ValueError as error:
        raise StoreError(str(error)) from None
    return S3Store(place, stop=stop, delays=replace(USUAL, give_up=timeout))
