"""A bad network in front of a real object store: an HTTP proxy that breaks chosen requests, or any, by a seed.

    client ──▶ delay? ──▶ cut | 500 | 503 | SlowDown ──▶ store
    client ◀── whole | cut | cut within | shorter than the object | stalled ◀────┘

Each request has a thread of its own. `fail` chooses requests; `rate` breaks others at random.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

from tests.support.objects import CREDENTIALS, ObjectStore
from tests.support.waiting import PATIENCE

ERRORS = {
    "500": (500, "InternalError"),
    "503": (503, "ServiceUnavailable"),
    "SlowDown": (503, "SlowDown"),
    "denied": (403, "AccessDenied"),
    "not implemented": (501, "NotImplemented"),
}
RANDOM = ("500", "503", "SlowDown", "cut before", "cut after", "cut within", "short", "delayed")
"""What happens by itself where a rate is set."""
_HOP = {"connection", "transfer-encoding", "expect", "keep-alive"}


@dataclass
class Fault:
    """What happens to the next `times` requests of this method whose path and query contain a text."""

    kind: str
    method: str = ""
    containing: str = ""
    times: int = 1

    def meets(self, method: str, path: str) -> bool:
        return self.times > 0 and self.method in ("", method) and self.containing in path


@dataclass
class FaultyStore:
    """See the module's docstring. `happened` counts faults by kind, `requests` lists all as `METHOD path`."""

    store: ObjectStore
    seed: int = 0
    rate: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Set when stalled requests may end."""
    port: int = 0
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find the store through this front."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def fail(self, kind: str, method: str = "", containing: str = "", times: int = 1) -> None:
        """Break the next requests of this kind."""
        with self._lock:
            self._faults.append(Fault(kind, method, containing, times))

    def calm(self) -> None:
        """Break nothing more."""
        with self._lock:
            self._faults.clear()
            self.rate = 0.0

    def fault_of(self, method: str, path: str) -> str:
        """What happens to a request; "" when nothing does."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            kind = ""
            for fault in self._faults:
                if fault.meets(method, path):
                    fault.times -= 1
                    kind = fault.kind
                    break
            else:
                if self._random.random() < self.rate:
                    kind = self._random.choice(RANDOM)
            if kind:
                self.happened[kind] += 1
            return kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: FaultyStore

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        kind = self.front.fault_of(self.command, self.path)
        if kind in ERRORS:
            self._refuse(*ERRORS[kind])
        elif kind == "cut before":
            self._cut()
        else:
            if kind == "delayed":
                self.front.released.wait(0.3)
            self._answer(self._forward(body), kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        behind = http.client.HTTPConnection("127.0.0.1", self.front.store.port, timeout=PATIENCE)
        try:
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            behind.request(self.command, self.path, body, kept)
            answer = behind.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            behind.close()

    def _answer(self, found: tuple[int, list[tuple[str, str]], bytes], kind: str) -> None:
        status, headers, body = found
        if kind == "cut after":
            self._cut()
            return
        sent = body if kind in ("", "delayed") else body[: len(body) // 2]
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOP:
                is_length = name.lower() == "content-length" and kind == "short"
                self.send_header(name, str(len(sent)) if is_length else value)
        self.end_headers()
        self.wfile.write(sent)
        if kind == "stalled":
            self.front.released.wait(PATIENCE)
        if kind in ("cut within", "stalled"):
            self._cut()

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(0 if self.command == "HEAD" else len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cut(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def handle(self) -> None:
        with suppress(OSError, http.client.HTTPException, ValueError):  # either side has gone
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def faulty_store(store: ObjectStore, seed: int = 0, rate: float = 0.0) -> Iterator[FaultyStore]:
    """A front for the duration of a block."""
    front = FaultyStore(store, seed, rate)
    handler = type("Handler", (_Handler,), {"front": front})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    front.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, name="faulty-store", daemon=True)
    thread.start()
    try:
        yield front
    finally:
        front.released.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)
