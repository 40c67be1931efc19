"""A file on its way to S3 while it is written: its first bytes stay here, the parts behind them go as they fill.

    | head, until the end | part 2 ─▶ | part 3 ─▶ | part 4 being filled |
    |<---- PART_BYTES --->|

So a header can be written last, and a file of any size takes the memory of a few parts. A file that ends within its
head is one request, anything larger a multipart upload.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from weight_sync.errors import StoreError
from weight_sync.stores.aws import complete
from weight_sync.stores.base import HEAD_BYTES
from weight_sync.stores.worker_pool import WorkerPool

PART_BYTES = HEAD_BYTES
"""Equal parts, as some stores demand: large enough that requests do not count, small enough that a lost one is soon
sent again."""
MAX_PARTS = 10_000
"""S3's limit: files of up to 156 GiB."""


class Requests(Protocol):
    """A store as an upload needs it: its pool, its client, and one request tried again in a worker."""

    pool: WorkerPool
    client: Any
    bucket: str

    def request(self, what: str, work: Callable[[], Any]) -> Any: ...

    def patiently(self, what: str, work: Callable[[], Any]) -> Any: ...


class Upload(io.RawIOBase):
    """A stream whose bytes become the object `key` with `complete`, or nothing with `abandon`.

    Memory: PART_BYTES for the head, as much for the part being filled, and what is in the pool."""

    def __init__(self, store: Requests, key: str) -> None:
        self._store, self.key = store, key
        self._head, self._filling = bytearray(), bytearray()
        self._at = self._size = 0
        self.upload_id = ""
        """Id of the multipart upload; "" when there is none."""
        self._parts: list[Future[str]] = []
        """From part 2 on."""

    # ---- as a stream --------------------------------------------------------------------------------------

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def write(self, data: Any) -> int:
        """Raises `StoreError` when the store refuses, `io.UnsupportedOperation` for bytes that were sent."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if view and self._at > self._size:
            gap, self._at = self._at - self._size, self._size
            self.write(bytes(gap))
        written = 0
        while written < len(view):
            written += self._write_some(view[written:])
        return written

    def _write_some(self, view: memoryview) -> int:
        """Bytes taken: at most up to the end of the part in which the position is."""
        if self._at < PART_BYTES:
            taken = view[: PART_BYTES - self._at]
            self._head[self._at : self._at + len(taken)] = taken
        elif self._at == self._size:
            taken = view[: PART_BYTES - len(self._filling)]
            self._filling += taken
        else:
            raise io.UnsupportedOperation(
                f"byte {self._at} of {self.key} has been sent: only the first {PART_BYTES} can be written again"
            )
        self._at += len(taken)
        self._size = max(self._size, self._at)
        if len(self._filling) == PART_BYTES:
            self._send_filled()
        return len(taken)

    # ---- to the store -------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Send the remaining bytes; the object is complete afterwards. Raises `StoreError`."""
        store = self._store
        if self._size <= PART_BYTES:
            body = bytes(self._head)
            store.request(
                f"writing {self.key}", lambda: store.client.put_object(Bucket=store.bucket, Key=self.key, Body=body)
            )
            return
        if self._filling:
            self._send_filled()
        first = self._send(1, self._head)
        etags = store.pool.gather([first, *self._parts])
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]

        def is_complete(head: Any | None) -> bool:
            return head is not None and int(head["ContentLength"]) == self._size

        store.request(
            f"completing {self.key}",
            lambda: complete(store.client, store.bucket, self.key, self.upload_id, parts, is_complete),
        )

    def _send_filled(self) -> None:
        for part in self._parts:
            if part.done():
                part.result()  # an upload that cannot be completed goes no further
        body, self._filling = self._filling, bytearray()
        self._parts.append(self._send(len(self._parts) + 2, body))

    def _send(self, number: int, body: bytearray) -> Future[str]:
        store, key = self._store, self.key
        if number > MAX_PARTS:
            raise StoreError(f"{key} is larger than {MAX_PARTS} parts of {PART_BYTES} bytes, S3's limit")
        if not self.upload_id:
            begun = store.request(
                f"beginning {key}", lambda: store.client.create_multipart_upload(Bucket=store.bucket, Key=key)
            )
            self.upload_id = begun["UploadId"]

        def send() -> str:
            answer = store.client.upload_part(
                Bucket=store.bucket, Key=key, UploadId=self.upload_id, PartNumber=number, Body=body
            )
            return str(answer["ETag"])

        return store.pool.submit(lambda: str(store.patiently(f"writing part {number} of {key}", send)))
