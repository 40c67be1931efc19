"""One connection between head and node: lines of JSON, beats, and an end when the other side is silent."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from pydantic import ValidationError

from launcher.nodes.messages import ADAPTER, AnyMessage, Beat, Message

T = TypeVar("T", bound=Message)

MOST_BYTES = 4 * 2**20
"""Of one message: a `Hello` with all keys of a configuration has tens of thousands."""
BEATS = 5
"""Beats within the silence that ends a connection."""


class LinkClosedError(Exception):
    """The other side is gone, or does not speak our language; the message says which."""


class Link:
    """silence: seconds without a word after which the other side counts as gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self._reader, self._writer, self.silence = reader, writer, silence
        self._beating: asyncio.Task[None] | None = None

    @property
    def peer(self) -> str:
        """Address of the other side."""
        return str((self._writer.get_extra_info("peername") or ("?",))[0])

    @property
    def address(self) -> str:
        """Our own, by which the other side knows us."""
        return str((self._writer.get_extra_info("sockname") or ("?",))[0])

    def send(self, message: Message) -> None:
        """Put a message on its way; what cannot be sent is noticed by `receive`."""
        if not self._writer.is_closing():
            self._writer.write(message.model_dump_json().encode() + b"\n")

    async def receive(self) -> AnyMessage:
        """The next message that is not a beat. Raises LinkClosedError."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        while True:
            try:
                async with asyncio.timeout(self.silence):
                    line = await self._reader.readline()
            except TimeoutError:
                raise LinkClosedError(f"no sign of life for {self.silence:g} s") from None
            except (OSError, ValueError) as error:  # ValueError: a line without an end
                raise LinkClosedError(str(error) or type(error).__name__) from None
            if not line.endswith(b"\n"):
                raise LinkClosedError("the connection was closed")
            try:
                message = ADAPTER.validate_json(line)
            except ValidationError as error:
                kind = error.errors(include_url=False)[0]["msg"]
                raise LinkClosedError(f"a message that is not understood ({kind})") from None
            if not isinstance(message, Beat):
                return message

    async def expect(self, kind: type[T]) -> T:
        """The next message, of this kind. Raises LinkClosedError."""
        message = await self.receive()
        if not isinstance(message, kind):
            raise LinkClosedError(f"expected {kind.__name__}, not {type(message).__name__}")
        return message

    async def _beat(self) -> None:
        while True:
            self.send(Beat())
            await asyncio.sleep(self.silence / BEATS)

    async def close(self) -> None:
        """Send what is left and hang up."""
        if self._beating is not None:
            self._beating.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._writer.wait_closed()
