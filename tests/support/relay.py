"""A network between two processes that breaks at a chosen byte: everything passes until then."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """Forwards connections to a port of this machine.

    at: bytes of the answers of one connection that pass as they are. Then `then` is called, once per connection,
    with the rest of what has come; it returns what passes of it, None to pass nothing more and keep the line open.
    only: how many connections that happens to; later ones pass whole.
    """

    def __init__(self, port: int, at: int, then: Callable[[bytes], bytes | None], *, only: int | None = None) -> None:
        self._target, self._at, self._then, self._only = port, at, then, only
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let go of everything that is held open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                breaks = self._only is None or self._only > 0
                if self._only is not None:
                    self._only -= 1
                threading.Thread(target=self._pass, args=(near, breaks), daemon=True).start()

    def _pass(self, near: socket.socket, breaks: bool) -> None:
        with near, contextlib.suppress(OSError):
            try:
                self._forward(near, breaks)
            finally:
                near.shutdown(socket.SHUT_RDWR)  # closing alone ends nothing while the other thread reads

    def _forward(self, near: socket.socket, breaks: bool) -> None:
        with socket.create_connection(("127.0.0.1", self._target)) as far:
            threading.Thread(target=_copy, args=(near, far), daemon=True).start()
            passed = 0
            while data := far.recv(1 << 16):
                if breaks and passed + len(data) > self._at:
                    keep = max(0, self._at - passed)
                    near.sendall(data[:keep])
                    rest = self._then(data[keep:])
                    if rest is None:
                        self._closed.wait()
                        return
                    near.sendall(rest)
                    breaks = False
                else:
                    near.sendall(data)
                passed += len(data)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
