"""The trainer's side: it listens at one port for as long as it lives, and hands out the newest publication.

What is sent lies in the store already and is mapped; of a distant store each file is fetched once, into the temporary
directory, for as long as the version is the newest. Connections are served by threads, `MAX_CONNECTIONS` at most,
each with a deadline, so that no connection can hold up publishing or other replicas.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from schema.util.proxies import is_loopback
from schema.wire.weights import Offer, Piece
from weight_sync.errors import WeightError
from weight_sync.manifest import parse_manifest
from weight_sync.stores import Store, split_key
from weight_sync.transport.group import Line, RoundGathering, SendingCarrier, chunks_of
from weight_sync.transport.wire import JOIN, Deadline, Status, TransferRequest, answer, greet, read_request, refuse

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
GREETING_S = 5.0
"""In which a replica must have said what it wants."""
_ELSEWHERE = "192.0.2.1"
"""Reserved for documentation: asking for the way there sends nothing."""


def own_address(controller_url: str, controller_host: str) -> str:
    """The address to listen at: that of this machine on the way to the controller.

    Any host that reaches the controller reaches the trainer by it in most networks, without configuration. On
    the controller's own machine that way is the loopback; then it is the address of the way out, unless the
    controller itself listens at the loopback alone, so that all replicas are on this machine.

    controller_url: as this machine reaches the controller. controller_host: at which the controller listens
    (`controller.host`).

    Raises `OSError` when no route leads to the controller, or its name is not known."""
    parts = urlsplit(controller_url)
    address = _towards(parts.hostname or "localhost", parts.port or 80)
    if is_loopback(address) and not is_loopback(controller_host):
        try:
            return _towards(_ELSEWHERE, 80)
        except OSError:  # a machine without a network
            return address
    return address


def _towards(host: str, port: int) -> str:
    """This machine's address on the way to another."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return str(way.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Served:
    """Totals of one sender."""

    files: int = 0
    n_bytes: int = 0
    failed: int = 0
    """Transfers that broke off: who did not get a file by the deadline fetches it from the store."""


@dataclass(slots=True)
class _Round:
    number: int
    token: bytes
    piece: Piece
    gathering: RoundGathering | None = None
    kept: dict[str, memoryview] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return split_key(self.piece.uri)[0]


class Sender:
    """Hands out the version offered last.

    store: where publications lie. address: of this machine, as replicas reach it; nothing else is listened at.
    timeout: seconds for one file, from the connection to its last byte. carrier: of a faster fabric, where there is
    one.

    Raises `OSError` when the address is not one of this machine."""

    def __init__(self, store: Store, address: str, timeout: float, carrier: SendingCarrier | None = None) -> None:
        self._store, self.address, self._timeout, self._carrier = store, address, timeout, carrier
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        self._round: _Round | None = None
        self._number = 0
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self.served = Served()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="weights-sender", daemon=True)
        self._thread.start()

    def offer(self, piece: Piece) -> Offer:
        """Hand out this version from now on, and no longer the one before."""
        self._number += 1
        carrier, before = self._carrier, self._round
        present = _Round(self._number, secrets.token_bytes(16), piece)
        if carrier is not None and carrier.works:
            usual = 0 if before is None or before.gathering is None else before.gathering.members
            present.gathering = RoundGathering(lambda lines: self._broadcast(carrier, present, lines), usual)
        self._round = present
        fabric: Literal["tcp", "nccl"] = "tcp" if present.gathering is None else "nccl"
        return Offer(
            address=self.address, port=self.port, round=self._number, token=present.token.hex(), fabric=fabric
        )

    def withdraw(self) -> None:
        """Hand out nothing until the next offer."""
        self._round = None

    def _count(self, files: int = 0, n_bytes: int = 0, failed: int = 0) -> None:
        with self._lock:
            known = self.served
            self.served = Served(known.files + files, known.n_bytes + n_bytes, known.failed + failed)

    def close(self) -> None:
        """Listen no more; transfers that are under way end by themselves. Idempotent."""
        self._round = None
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join(GREETING_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(0.1):  # too many open files, say: others still have the store
                    log.warning("no replica can be served at the moment: %s", error)
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="weights-send", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads: this replica still has the store
                log.warning("a replica cannot be served: %s", error)
                connection.close()
                self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._converse(connection)
        finally:
            self._free.release()

    def _converse(self, connection: socket.socket) -> None:
        present = self._round
        greeting, deadline = Deadline(min(GREETING_S, self._timeout)), Deadline(self._timeout)

        def token_of(number: int) -> bytes | None:
            return present.token if present is not None and present.number == number else None

        try:
            request = read_request(connection, greet(connection, greeting), token_of, greeting)
            if isinstance(request, Status):
                refuse(connection, request, deadline)
                return
        except (OSError, EOFError) as error:
            log.debug("a connection without a request: %s", error)
            return
        assert present is not None, "a request of no round is refused"
        if request.file == JOIN:
            self._join(connection, present, request, deadline)
        else:
            self._send(connection, present, request, deadline)

    def _join(self, connection: socket.socket, present: _Round, request: TransferRequest, deadline: Deadline) -> None:
        line = Line(connection, deadline)
        try:
            if present.gathering is None:
                refuse(connection, Status.MISSING, deadline)
                return
            answer(connection, request, present.token, memoryview(b""), deadline)
            present.gathering.attend(line)
        except Exception as error:  # of a fabric's libraries too: they raise whatever they like
            log.warning(
                "sending %s to several at once has failed, they get it one by one: %s", present.version, error
            )
            with contextlib.suppress(OSError):
                line.tell({"failed": str(error)})

    def _broadcast(self, carrier: SendingCarrier, present: _Round, lines: Sequence[Line]) -> None:
        deadline, piece = lines[0].deadline, present.piece
        manifest = parse_manifest(bytes(self._read(present, split_key(piece.uri)[1], deadline)), piece)
        chunks = chunks_of(manifest.files)
        try:
            carrier.send(lines, chunks, lambda file: self._read(present, file, deadline))
        except Exception:
            self._count(failed=len(lines))
            raise
        self._count(len(manifest.files) * len(lines), present.piece.n_bytes * len(lines))

    def _send(self, connection: socket.socket, present: _Round, request: TransferRequest, deadline: Deadline) -> None:
        try:
            data = self._read(present, request.file, deadline)
        except (WeightError, OSError) as error:
            log.warning("%s/%s cannot be sent: %s", present.version, request.file, error)
            with contextlib.suppress(OSError):
                refuse(connection, Status.MISSING, deadline)
            return
        try:
            answer(connection, request, present.token, data, deadline)
        except OSError as error:
            self._count(failed=1)
            log.warning(
                "sending %s/%s broke off, its receiver has the store: %s", present.version, request.file, error
            )
        else:
            self._count(1, len(data))

    def _read(self, present: _Round, file: str, deadline: Deadline) -> memoryview:
        # A distant store is asked once, however many replicas ask; while it fails they do not wait for it.
        lock = present.locks.setdefault(file, threading.Lock())
        if not lock.acquire(timeout=deadline.left()):
            raise TimeoutError("the store does not answer")
        try:
            if file not in present.kept:
                present.kept[file] = self._mapped(f"{present.version}/{file}")
            return present.kept[file]
        finally:
            lock.release()

    def _mapped(self, key: str) -> memoryview:
        if self._store.directory is not None:
            return self._store.read(key)
        with tempfile.TemporaryDirectory(prefix="cosmos-send-") as folder:
            path = Path(folder) / "file"
            if self._store.download(key, path) == 0:
                return memoryview(b"")
            with path.open("rb") as stream:  # what is mapped stays when its name goes
                return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
