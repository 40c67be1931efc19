"""A store behind a slow wire: a token bucket in each direction."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from weight_sync.stores import DirectoryStore
from weight_sync.stores.base import check_size

CHUNK = 1 << 18


class Bucket:
    """Lets so many bytes pass in a second, for all threads together."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def take(self, n_bytes: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + n_bytes / self._rate
            ready = self._free
        time.sleep(max(0.0, ready - time.monotonic()))


class LimitedStream:
    """A file of which every written chunk waits for its turn."""

    def __init__(self, stream: IO[bytes], bucket: Bucket) -> None:
        self._stream, self._bucket = stream, bucket

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            self._bucket.take(len(view[start : start + CHUNK]))
            self._stream.write(view[start : start + CHUNK])
        return len(view)

    def seek(self, place: int) -> int:
        return self._stream.seek(place)


class LimitedStage:
    def __init__(self, stage: Any, bucket: Bucket) -> None:
        self._stage, self._bucket = stage, bucket

    @contextmanager
    def create(self, file: str) -> Iterator[Any]:
        with self._stage.create(file) as stream:
            yield LimitedStream(stream, self._bucket)

    def commit(self) -> None:
        self._stage.commit()


class LimitedStore(DirectoryStore):
    """A directory that is far away: nothing is mapped, everything comes through a bucket, each way its own."""

    def __init__(self, root: Path, rate: float) -> None:
        super().__init__(root)
        self._up, self._down = Bucket(rate), Bucket(rate)

    @property
    def directory(self) -> None:  # type: ignore[override]
        return None

    @contextmanager
    def stage(self, version: str, *, leads: bool = True) -> Iterator[Any]:
        with super().stage(version, leads=leads) as stage:
            yield LimitedStage(stage, self._up)

    def read(self, key: str) -> memoryview:
        data = super().read(key)
        self._down.take(len(data))
        return data

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        check_size(key, (self.root / key).stat().st_size, n_bytes)
        with (self.root / key).open("rb") as source, to.open("xb") as target:
            while chunk := source.read(CHUNK):
                self._down.take(len(chunk))
                target.write(chunk)
            return target.tell()
