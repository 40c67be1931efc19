"""The replica's side: a store whose newest version comes from the trainer, and everything else from the store.

A file of the version that is expected is asked of the trainer once. What fails, comes late or is asked for again
(its bytes were not what the hashes say) is taken from the store, and so is the rest of that version. Whoever could
not reach the trainer at all asks only every second, fourth, … version from then on, up to every `MOST_SKIPPED`.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from schema.wire.weights import Offer, Publication, WeightManifest
from weight_sync.layout import digest
from weight_sync.stores import ReadableStore, split_key
from weight_sync.transport.group import Chunk, Line, ReceivingCarrier, chunks_of
from weight_sync.transport.wire import JOIN, Deadline, TransferError, UnreachableError, ask, receive

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 1 << 30
CONNECT_S = 5.0
MOST_SKIPPED = 64


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How the version expected last has come."""

    files: int
    """Files that the trainer has sent. None where another replica of the host had fetched the version already."""
    n_bytes: int
    fallback: str | None
    """Why the store was needed; None: it was not."""


@dataclass(slots=True)
class _Expected:
    """A version on its way. Threads share it under the store's lock."""

    publication: Publication
    offer: Offer
    version: str
    deadline: Deadline | None = None
    manifest: memoryview | None = None
    """Proven by the publication's hash."""
    asked: set[str] = field(default_factory=set)
    joining: threading.Lock = field(default_factory=threading.Lock)
    carried: dict[str, Path] | None = None
    """Files that came all at once, where they lie until they are asked for; None: not tried yet."""
    files: int = 0
    n_bytes: int = 0

    def is_manifest(self, key: str) -> bool:
        return key == self.publication.uri


class DirectStore:
    """A `ReadableStore` that reads the version it expects from the trainer.

    store: what it falls back to, and where all other versions lie. timeout: seconds from the first file on in which
    the trainer must have sent a version. carrier: of a faster fabric, where there is one."""

    def __init__(self, store: ReadableStore, timeout: float, carrier: ReceivingCarrier | None = None) -> None:
        self._store, self._timeout, self._carrier = store, timeout, carrier
        self._lock = threading.Lock()
        self._expected: _Expected | None = None
        self._fallback: str | None = None
        self._unreachable = self._skip = 0

    def __repr__(self) -> str:
        return f"DirectStore({self._store!r})"

    def expect(self, publication: Publication) -> None:
        """The version that is read next. Without an offer it comes from the store, as it does when asking the
        trainer has been of no use lately."""
        with self._lock:
            self._expected, self._fallback = None, None
            offer = publication.offer
            if offer is None:
                self._fall_back("the trainer has not offered it")
            elif self._skip > 0:
                self._skip -= 1
                self._fall_back(f"the trainer could not be reached {self._unreachable} times")
            else:
                version, _ = split_key(publication.uri)
                self._expected = _Expected(publication, offer, version)

    def outcome(self) -> TransferOutcome:
        """Return what became of the version expected last."""
        with self._lock:
            expected = self._expected
            files, n_bytes = (0, 0) if expected is None else (expected.files, expected.n_bytes)
            return TransferOutcome(files, n_bytes, self._fallback)

    def _fall_back(self, why: str) -> None:
        """Once per version; under the lock."""
        if self._fallback is None:
            self._fallback = why

    # ---- reading ------------------------------------------------------------------------------------------

    @property
    def directory(self) -> None:
        """None: nothing is read where it lies, so that the trainer is asked."""
        return None

    def read(self, key: str) -> memoryview:
        expected = self._wanted(key)
        if expected is None:
            return self._store.read(key)
        if expected.is_manifest(key) and expected.manifest is not None:
            return expected.manifest
        buffer = bytearray()
        if not self._received(expected, key, buffer.extend):
            return self._store.read(key)
        data = memoryview(buffer)
        if expected.is_manifest(key):
            if digest(data).hex() != expected.publication.manifest_hash:
                self._give_up(f"{key} came damaged")
                return self._store.read(key)
            expected.manifest = data
        return data

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        expected = self._wanted(key)
        if expected is not None:
            if (carried := self._carried(expected, key, to)) is not None:
                return carried
            temporary = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
            try:
                with temporary.open("xb") as stream:
                    received = self._received(expected, key, stream.write, n_bytes)
                    written = stream.tell()
                if received:
                    temporary.rename(to)
                    return written
            finally:
                temporary.unlink(missing_ok=True)
        return self._store.download(key, to, n_bytes)

    def _wanted(self, key: str) -> _Expected | None:
        """The version expected, if `key` is a file of it that the trainer is to be asked for."""
        version, _ = split_key(key)
        with self._lock:
            expected = self._expected
            if expected is None or self._fallback is not None or version != expected.version:
                return None
            if expected.is_manifest(key) and expected.manifest is not None:
                return expected
            if key in expected.asked:
                self._fall_back(f"{key} came damaged")
                return None
            expected.asked.add(key)
            if expected.deadline is None:
                expected.deadline = Deadline(self._timeout)
            return expected

    def _received(
        self, expected: _Expected, key: str, write: Callable[[memoryview], object], n_bytes: int | None = None
    ) -> bool:
        """Have the trainer send a file, of so many bytes; False when that failed. Raises what `write` raises."""
        received = 0
        try:
            for piece in self._pieces(expected, key, n_bytes):
                write(piece)
                received += len(piece)
        except TransferError as error:
            self._give_up(str(error), unreachable=isinstance(error, UnreachableError))
            return False
        with self._lock:
            self._unreachable = 0
            expected.files += 1
            expected.n_bytes += received
        return True

    def _pieces(self, expected: _Expected, key: str, n_bytes: int | None) -> Iterator[memoryview]:
        """The bytes of a file as they come from the trainer. Raises `TransferError`."""
        assert expected.deadline is not None, "it begins with the first file"
        offer, deadline, (_, file) = expected.offer, expected.deadline, split_key(key)
        most = MAX_MANIFEST_BYTES if expected.is_manifest(key) else expected.publication.n_bytes
        try:
            seconds = min(CONNECT_S, deadline.left())
            connection = socket.create_connection((offer.address, offer.port), timeout=seconds)
        except OSError as error:
            raise UnreachableError(
                f"the trainer cannot be reached at {offer.address}:{offer.port}: {error}"
            ) from error
        try:
            with connection:
                size = ask(connection, offer.round, bytes.fromhex(offer.token), file, most, deadline)
                if n_bytes is not None and size != n_bytes:
                    raise TransferError(f"{file} would have {size} bytes instead of {n_bytes}")
                yield from receive(connection, size, deadline)
        except TimeoutError:
            raise TransferError(f"{file} did not come within {self._timeout:g} s") from None
        except (OSError, EOFError) as error:
            raise TransferError(f"{file} did not come whole: {error}") from error

    def _carried(self, expected: _Expected, key: str, to: Path) -> int | None:
        """Have the file if it came, or can come, with all others at once; its bytes. Raises `OSError` of the disk."""
        if self._carrier is None or expected.offer.fabric == "tcp" or expected.manifest is None:
            return None
        with expected.joining:
            if expected.carried is None:
                expected.carried = self._join(expected, self._carrier, to.parent)
            path = expected.carried.pop(split_key(key)[1], None)
        if path is None:
            return None
        path.rename(to)
        n_bytes = to.stat().st_size
        with self._lock:
            expected.files += 1
            expected.n_bytes += n_bytes
        return n_bytes

    def _join(self, expected: _Expected, carrier: ReceivingCarrier, folder: Path) -> dict[str, Path]:
        """Receive all data files of the version into a folder; where they lie. None of them when that fails."""
        if not carrier.works:
            return {}
        assert expected.manifest is not None, "the manifest says what to receive"
        assert expected.deadline is not None, "it begins with the first file"
        files = WeightManifest.model_validate_json(bytes(expected.manifest)).files
        offer, deadline = expected.offer, expected.deadline
        with ExitStack() as stack:
            paths, streams = {}, {}
            for file in files:
                paths[file.name] = path = folder / f".{file.name}.{secrets.token_hex(4)}"
                stack.callback(path.unlink, missing_ok=True)
                streams[file.name] = stack.enter_context(path.open("xb"))

            def write(chunk: Chunk, data: memoryview) -> None:
                streams[chunk.file].seek(chunk.offset)
                streams[chunk.file].write(data)

            try:
                seconds = min(CONNECT_S, deadline.left())
                connection = socket.create_connection((offer.address, offer.port), timeout=seconds)
                stack.enter_context(connection)
                ask(connection, offer.round, bytes.fromhex(offer.token), JOIN, 0, deadline)
                carrier.receive(Line(connection, deadline), chunks_of(files), write)
            except (TransferError, OSError, EOFError) as error:
                log.warning("taking the version file by file from the trainer: %s", error)
                return {}
            for stream in streams.values():
                stream.close()
            stack.pop_all()
        connection.close()
        return paths

    def _give_up(self, why: str, *, unreachable: bool = False) -> None:
        """Take the rest of this version from the store."""
        with self._lock:
            first = self._fallback is None
            self._fall_back(why)
            if unreachable and first:
                self._unreachable += 1
                self._skip = min(2 ** (self._unreachable - 1), MOST_SKIPPED) - 1
        if first:
            log.warning("taking the version from the store: %s", why)

    # ---- everything else is the store's -------------------------------------------------------------------

    def probe(self, *, writing: bool) -> None:
        self._store.probe(writing=writing)

    def trouble(self) -> str:
        return self._store.trouble()
