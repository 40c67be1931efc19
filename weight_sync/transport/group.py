"""A transfer to several hosts at once, where a faster fabric than TCP carries it (NCCL between GPUs).

    replica   asks for `JOIN` instead of a file, over the same authenticated connection, which stays open
    trainer   takes in replicas until as many are there as last time, `GATHER_S` at most
    both      carrier.send / carrier.receive: messages over the line, bytes over the fabric

What travels are the data files of the version, in chunks that both sides derive from its manifest: they are proven as
if they came from the store. A replica that is too late, and all of them when it fails, request single files.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from schema.wire.weights import FileEntry
from weight_sync.transport.wire import Deadline, TransferError, receive_exactly, send_all

CHUNK_BYTES = 256 << 20
GATHER_S = 1.0
"""Seconds that the first one waits for others."""
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a data file, small enough to lie in a GPU's memory next to everything else."""

    file: str
    offset: int
    n_bytes: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.offset}"


def chunks_of(files: Sequence[FileEntry], most_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """All bytes of the files, in order."""
    return [
        Chunk(file.name, start, min(most_bytes, file.n_bytes - start))
        for file in files
        for start in range(0, file.n_bytes, most_bytes)
    ]


class Line:
    """Messages (JSON objects) between trainer and one member, over their connection."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self.deadline = connection, deadline

    def tell(self, message: Mapping[str, Any]) -> None:
        """Raises `OSError`."""
        text = json.dumps(message, separators=(",", ":")).encode()
        send_all(self._connection, len(text).to_bytes(4, "little") + text, self.deadline)

    def hear(self) -> dict[str, Any]:
        """Raises `OSError`, `EOFError`; `TransferError` for what is not a message, or reports a failure."""
        size = int.from_bytes(receive_exactly(self._connection, 4, self.deadline), "little")
        if size > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message would have {size} bytes")
        try:
            message = json.loads(receive_exactly(self._connection, size, self.deadline))
        except ValueError:
            raise TransferError("a message is not JSON") from None
        if not isinstance(message, dict):
            raise TransferError("a message is not an object")
        if "failed" in message:
            raise TransferError(f"the other side says: {str(message['failed'])[:500]}")
        return message


class SendingCarrier(Protocol):
    """The trainer's end of a fabric."""

    @property
    def works(self) -> bool:
        """Whether it is worth offering."""

    def send(self, lines: Sequence[Line], chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> None:
        """Hand the chunks to all members at once, within the deadline of the lines.

        Raises whatever goes wrong; the members have been informed, or find out by their deadlines."""


class ReceivingCarrier(Protocol):
    """A host's end of a fabric."""

    @property
    def works(self) -> bool:
        """Whether it is worth joining."""

    def receive(self, line: Line, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        """Take in exactly these chunks, within the deadline of the line.

        Raises `TransferError`, `OSError` or `EOFError` when they do not come, and what `write` raises."""


class RoundGathering:
    """The members of one round. The thread of the first one waits for the others, then sends for all of them."""

    def __init__(self, send: Callable[[list[Line]], None], usual: int) -> None:
        self._send, self._usual = send, usual
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._fixed = False
        self._over = threading.Event()

    @property
    def members(self) -> int:
        with self._changed:
            return len(self._lines)

    def attend(self, line: Line) -> None:
        """Take part; returns when it is over. Raises `TransferError` for who comes too late, and, in the thread that
        sends, whatever that raises."""
        with self._changed:
            if self._fixed:
                raise TransferError("the members of this round are fixed")
            self._lines.append(line)
            self._changed.notify_all()
            sends = len(self._lines) == 1
            if sends:
                wait = min(GATHER_S, line.deadline.left())
                self._changed.wait_for(lambda: len(self._lines) >= self._usual > 0, wait)
                self._fixed = True
        if not sends:
            self._over.wait(line.deadline.left())
            return
        try:
            self._send(list(self._lines))
        finally:
            self._over.set()
