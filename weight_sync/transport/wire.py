"""The conversation between a trainer and a replica about one file, over one TCP connection.

    trainer   MAGIC, nonce                                                   8 + 16 bytes
    replica   nonce, round, length of the name, name, MAC                    16 + 8 + 1 + n + 32 bytes
    trainer   status, length of the file, MAC, the file                      1 + 8 + 32 + n bytes

Numbers are little-endian. Both MACs are HMAC-SHA256 under the round's token, over who speaks, both nonces and what
precedes them in the message: neither side talks to a peer without the token of the controller, and no
message can be used twice. The bytes of the file have no MAC: they must have the hashes of the publication. They are
not encrypted either, as those of NCCL are not: the network between trainer and replicas is to be a private one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from weight_sync.stores import FILE_NAME

MAGIC = b"CWDIRECT"
NONCE_BYTES, ROUND_BYTES, LENGTH_BYTES, MAC_BYTES = 16, 8, 8, 32
JOIN = ".join"
"""Asked for instead of a file, by who wants to take part in a transfer to several at once (`group`)."""
CHUNK = 4 << 20
"""Bytes that are received and written at once."""


class Status(IntEnum):
    HERE = 0
    OVER = 1
    """The round is not the present one: a newer version was offered, or none any more."""
    REFUSED = 2
    """Wrong token, or something that is not a request."""
    MISSING = 3


_WHY: dict[int, str] = {
    Status.OVER: "the trainer offers another version by now",
    Status.REFUSED: "the trainer refused the token",
    Status.MISSING: "the trainer cannot read the file",
}


class TransferError(Exception):
    """A version did not come from the trainer: the store is asked instead. Says why."""


class UnreachableError(TransferError):
    """Nothing answers where the trainer should."""


class Deadline:
    """The end of all waits of one conversation."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, more than zero. Raises `TimeoutError` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("time is up")
        return left


@dataclass(frozen=True, slots=True)
class TransferRequest:
    round: int
    file: str
    nonces: bytes
    """The trainer's, then the replica's."""


def _mac(token: bytes, speaker: bytes, nonces: bytes, body: bytes) -> bytes:
    return hmac.digest(token, speaker + nonces + body, hashlib.sha256)


def receive_exactly(connection: socket.socket, n_bytes: int, deadline: Deadline) -> bytes:
    """Read exactly `n_bytes`. Raises `EOFError` when the peer hangs up, `OSError` for a network error."""
    received = bytearray()
    while len(received) < n_bytes:
        connection.settimeout(deadline.left())
        piece = connection.recv(n_bytes - len(received))
        if not piece:
            raise EOFError("the other side hung up")
        received += piece
    return bytes(received)


def send_all(connection: socket.socket, data: bytes | memoryview, deadline: Deadline) -> None:
    """Everything, or `OSError`."""
    connection.settimeout(deadline.left())  # of sendall as a whole
    connection.sendall(data)


# ---- the trainer's side -----------------------------------------------------------------------------------


def greet(connection: socket.socket, deadline: Deadline) -> bytes:
    """Begin the conversation; the trainer's nonce."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    send_all(connection, MAGIC + nonce, deadline)
    return nonce


def read_request(
    connection: socket.socket, nonce: bytes, token_of: Callable[[int], bytes | None], deadline: Deadline
) -> TransferRequest | Status:
    """Return what a replica asks for, or why it gets nothing.

    token_of: the token of a round; None for one that is over."""
    head = receive_exactly(connection, NONCE_BYTES + ROUND_BYTES + 1, deadline)
    rest = receive_exactly(connection, head[-1] + MAC_BYTES, deadline)
    name, mac = rest[:-MAC_BYTES], rest[-MAC_BYTES:]
    number = int.from_bytes(head[NONCE_BYTES:-1], "little")
    token = token_of(number)
    if token is None:
        return Status.OVER
    nonces = nonce + head[:NONCE_BYTES]
    if not hmac.compare_digest(mac, _mac(token, b"replica", nonces, head[NONCE_BYTES:] + name)):
        return Status.REFUSED
    file = name.decode("ascii", "replace")
    if file != JOIN and not FILE_NAME.fullmatch(file):
        return Status.REFUSED
    return TransferRequest(number, file, nonces)


def refuse(connection: socket.socket, status: Status, deadline: Deadline) -> None:
    send_all(connection, bytes([status]) + bytes(LENGTH_BYTES + MAC_BYTES), deadline)


def answer(
    connection: socket.socket, request: TransferRequest, token: bytes, data: memoryview, deadline: Deadline
) -> None:
    """Send the file."""
    length = len(data).to_bytes(LENGTH_BYTES, "little")
    send_all(connection, bytes([Status.HERE]) + length + _mac(token, b"trainer", request.nonces, length), deadline)
    send_all(connection, data, deadline)


# ---- the replica's side -----------------------------------------------------------------------------------


def ask(connection: socket.socket, number: int, token: bytes, file: str, most_bytes: int, deadline: Deadline) -> int:
    """Ask for a file: its bytes, which follow on the connection.

    Raises `TransferError`: the other side is not a trainer with this token, has no such file, or one above
    `most_bytes`; `OSError`, `EOFError`: the connection broke."""
    greeting = receive_exactly(connection, len(MAGIC) + NONCE_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise TransferError("the server at that address is not a trainer")
    name = file.encode("ascii")
    nonce, body = (
        secrets.token_bytes(NONCE_BYTES),
        number.to_bytes(ROUND_BYTES, "little") + bytes([len(name)]) + name,
    )
    nonces = greeting[len(MAGIC) :] + nonce
    send_all(connection, nonce + body + _mac(token, b"replica", nonces, body), deadline)
    head = receive_exactly(connection, 1 + LENGTH_BYTES + MAC_BYTES, deadline)
    status, length, mac = head[0], head[1 : 1 + LENGTH_BYTES], head[1 + LENGTH_BYTES :]
    if status != Status.HERE:
        raise TransferError(_WHY.get(status, f"it answers with status {status}"))
    if not hmac.compare_digest(mac, _mac(token, b"trainer", nonces, length)):
        raise TransferError("the server at that address does not have the token")
    n_bytes = int.from_bytes(length, "little")
    if n_bytes > most_bytes:
        raise TransferError(f"{file} would have {n_bytes} bytes, more than the {most_bytes} that were announced")
    return n_bytes


def receive(connection: socket.socket, n_bytes: int, deadline: Deadline) -> Iterator[memoryview]:
    """The file that was asked for, piece by piece; a piece is valid until the next one."""
    buffer = memoryview(bytearray(min(CHUNK, n_bytes)))
    while n_bytes > 0:
        connection.settimeout(deadline.left())
        got = connection.recv_into(buffer, min(len(buffer), n_bytes))
        if got == 0:
            raise EOFError("the other side hung up")
        yield buffer[:got]
        n_bytes -= got
