"""The pool and a reward process exchange JSON messages with their length in front.

    pool    ──▶ {"functions": [name, …], "custom": {…}}        once, at the start
    process ──▶ {"ready": true} or {"fatal": "why"}
    pool    ──▶ {"sample": [completion, row, [name, …]]}
    process ──▶ {"at": name}        before each function but the first
    process ──▶ {"rewards": {name: value}, "error": null or "why", "outage": bool, "answer": null or the extracted
                 one, "seconds": s}

One sample at a time: whom a missed deadline or a crash is charged to is never in doubt.
"""

from __future__ import annotations

import json
from typing import Any

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class ProtocolError(Exception):
    """The bytes that arrived are not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """One message as bytes. NaN and infinity are refused (`ValueError`): nothing on the wire is not JSON."""
    text = json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    body = text.encode("utf-8", "replace")
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class MessageDecoder:
    """Bytes as they come in, messages as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """All messages that are complete with these bytes. Raises `ProtocolError`."""
        self._buffer += data
        messages: list[dict[str, Any]] = []
        position = 0
        while len(self._buffer) - position >= LENGTH_BYTES:
            start = position + LENGTH_BYTES
            length = int.from_bytes(self._buffer[position:start], "little")
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message claims {length} bytes")
            if len(self._buffer) < start + length:
                break
            messages.append(_parse(self._buffer[start : start + length]))
            position = start + length
        del self._buffer[:position]
        return messages


def _parse(body: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError("a message is not a JSON object")
    return message
