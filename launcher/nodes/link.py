"""One connection between head and node: proofs, then sealed messages, and an end when the other side is silent.

    node ─▶ nonce ─▶ head        `schema.util.proof_exchange`, with the address that was dialled as a claim
    node ◀─ nonce, proof ◀─ head
    node ─▶ proof ─▶ head
    each: length, MAC, message   4 + 32 + n bytes, a JSON object; the MAC covers how many messages came before

The token never crosses. Until both are proven neither side reads more than the fixed bytes of the proof.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from pydantic import ValidationError

from launcher.nodes.announcement import HeadAddress
from launcher.nodes.messages import ADAPTER, AnyMessage, Beat, NodeMessage, Refusal
from schema.util.proof import Handshake, Speaker
from schema.util.proof_exchange import (
    ANSWER_BYTES,
    MAC_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    ClientProof,
    ProofError,
    Seal,
    ServerProof,
)

T = TypeVar("T", bound=NodeMessage)

PURPOSE = "cosmos-launch: head and node"
PROVE = 10.0
"""Seconds for the proofs, and for TLS where it is used: machines of one job answer at once."""
BUFFER = 1024
"""Bytes of a `StreamReader`: longer messages are read with their length known, which takes both proofs."""
LENGTH_BYTES = 4
MOST_BYTES = 4 * 2**20
"""The largest message: a `Hello` with all keys of a configuration has tens of thousands of bytes."""
BEATS = 5
"""Beats within the silence that ends a connection."""


class LinkClosedError(Exception):
    """The other side is gone, or does not speak our language; the message says which."""


class RefusedError(LinkClosedError):
    """The head refuses this machine."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class NodeLink:
    """A connection whose two ends are proven. Made by `to_head` and `to_node`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        silence: float,
        handshake: Handshake,
        ours: Speaker,
    ) -> None:
        """silence: seconds without a word after which the other side counts as gone. ours: which end this one is."""
        self._reader, self._writer, self.silence = reader, writer, silence
        theirs: Speaker = "client" if ours == "server" else "server"
        self._sending, self._receiving = Seal(handshake, ours), Seal(handshake, theirs)
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def to_head(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float, token: str, head: HeadAddress
    ) -> NodeLink:
        """Prove this node to the head, once that has proven itself. Raises `ProofError`; the caller closes `writer`.

        head: as it was dialled.
        """
        prover = ClientProof(PURPOSE, token, (str(head),))
        writer.write(prover.opening)
        proof, handshake = prover.check(await _exactly(reader, ANSWER_BYTES))
        writer.write(proof)
        return cls(reader, writer, silence, handshake, "client")

    @classmethod
    async def to_node(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float, token: str, head: HeadAddress
    ) -> NodeLink:
        """Prove this head to a node, and wait for its proof. Raises `ProofError`; the caller closes `writer`."""
        prover = ServerProof(PURPOSE, token, await _exactly(reader, OPENING_BYTES), (str(head),))
        writer.write(prover.answer)
        handshake = prover.check(await _exactly(reader, PROOF_BYTES))
        return cls(reader, writer, silence, handshake, "server")

    @property
    def peer(self) -> str:
        """Address of the other side."""
        return str((self._writer.get_extra_info("peername") or ("?",))[0])

    @property
    def address(self) -> str:
        """Our own, by which the other side reaches us."""
        return str((self._writer.get_extra_info("sockname") or ("?",))[0])

    def send(self, message: NodeMessage) -> None:
        """Put a message on its way; what cannot be sent is noticed by `receive`."""
        if not self._writer.is_closing():
            body = message.model_dump_json().encode()
            self._writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + self._sending.mac(body) + body)

    async def receive(self) -> AnyMessage:
        """The next message that is not a beat. Raises LinkClosedError."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        while True:
            try:
                async with asyncio.timeout(self.silence):
                    body = await self._next()
            except TimeoutError:
                raise LinkClosedError(f"no sign of life for {self.silence:g} s") from None
            try:
                message = ADAPTER.validate_json(body)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                field = ".".join(map(str, first["loc"]))
                raise LinkClosedError(f"a message that is not understood ({field}: {first['msg']})") from None
            if not isinstance(message, Beat):
                return message

    async def _next(self) -> bytes:
        """The next message, whose MAC is right. Raises LinkClosedError."""
        try:
            head = await self._reader.readexactly(LENGTH_BYTES + MAC_BYTES)
            size = int.from_bytes(head[:LENGTH_BYTES], "big")
            if size > MOST_BYTES:
                raise LinkClosedError(f"a message would have {size} bytes, more than {MOST_BYTES}")
            body = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise LinkClosedError("the connection was closed") from None
        except OSError as error:
            raise LinkClosedError(str(error) or type(error).__name__) from None
        if not self._receiving.holds(body, head[LENGTH_BYTES:]):
            raise LinkClosedError(
                f"a message from {self.peer} has a wrong MAC: something in between has changed, repeated, "
                "reordered, added or left out a message"
            )
        return body

    async def expect(self, kind: type[T]) -> T:
        """The next message, of this kind. Raises LinkClosedError, and RefusedError for a refusal."""
        message = await self.receive()
        if not isinstance(message, kind):
            if isinstance(message, Refusal):
                raise RefusedError(message)
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


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    """So many bytes within `PROVE` seconds. Raises `ProofError`."""
    try:
        async with asyncio.timeout(PROVE):
            return await reader.readexactly(count)
    except TimeoutError:
        raise ProofError(f"it has not proven anything for {PROVE:g} s") from None
    except asyncio.IncompleteReadError:
        raise ProofError("it has closed the connection") from None
    except OSError as error:
        raise ProofError(f"it has closed the connection: {error.strerror or error}") from None
