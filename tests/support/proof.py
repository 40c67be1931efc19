"""Proofs of a controller, for servers that stand in for one; and a listener that records what is sent to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from controller.services.proof import ProofService
from schema.wire.messages.proof import ProofRequest
from tests.support.waiting import PATIENCE


def proof_of(target: str, tokens: list[str], address: tuple[Any, ...]) -> bytes:
    """The body of the answer to GET `target`, which arrived at `address`."""
    asked = ProofRequest.model_validate(dict(parse_qsl(urlsplit(target).query)))
    return ProofService(tokens).prove(asked, address[0], address[1]).model_dump_json().encode()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """An answer of HTTP/1.1."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Impostor:
    """Listens where a controller might. `received`: every byte that anybody has sent to it.

    answer: what it answers to a request head, given that and its own address; None: nothing, and the line stays open.
    """

    def __init__(
        self, answer: Callable[[str, tuple[Any, ...]], bytes | None], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._answer = answer
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address = self._listener.getsockname()
        self.received, self.connections = b"", 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self.address[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            pending = b""
            while data := connection.recv(65536):
                self.received += data
                pending += data
                if b"\r\n\r\n" not in pending:
                    continue
                answer = self._answer(pending.decode("latin-1"), connection.getsockname())
                pending = b""
                if answer is None:
                    continue
                if answer:
                    connection.sendall(answer)
                else:
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()
        self._thread.join(PATIENCE)


@contextmanager
def impostor(
    answer: Callable[[str, tuple[Any, ...]], bytes | None], host: str = "127.0.0.1", port: int = 0
) -> Iterator[Impostor]:
    """A listener for the duration of a block."""
    listening = Impostor(answer, host, port)
    try:
        yield listening
    finally:
        listening.close()
