"""The bytes of a mutual proof (`schema.util.proof`) on a stream, and the MACs of the messages that follow it.

    client   MAGIC, nonce             8 + 16 bytes
    server   MAGIC, nonce, proof      8 + 16 + 32 bytes      the client stops here if the proof is wrong
    client   proof                    32 bytes
    both     messages, each with the MAC of its `Seal`

All sizes are fixed, so an end that has proven nothing cannot make the other one read more. The caller reads and
writes: the same classes serve asyncio and blocking sockets.
"""

from __future__ import annotations

import hashlib
import hmac

from schema.util.proof import NONCE_BYTES, Handshake, Speaker, new_nonce

MAGIC = b"CWPROOF1"
MAC_BYTES = PROOF_BYTES = hashlib.sha256().digest_size
OPENING_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = OPENING_BYTES + PROOF_BYTES


class ProofError(Exception):
    """The other end has not proven that it knows the token; the message says what it sent instead."""


class Seal:
    """Numbers and authenticates the messages of one direction of one connection.

    A message that was changed, repeated, reordered or sent by somebody else has another MAC, and so has each message
    after one that was left out.
    """

    def __init__(self, handshake: Handshake, speaker: Speaker) -> None:
        self._key, self._count, self._broken = handshake.key(speaker), 0, False

    def mac(self, body: bytes) -> bytes:
        """The MAC of the next message."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + body, hashlib.sha256)

    def holds(self, body: bytes, mac: bytes) -> bool:
        """Whether this is the next message; after one that is not, no other is. Compared in constant time."""
        self._broken |= not hmac.compare_digest(self.mac(body), mac)
        return not self._broken


class ClientProof:
    """The end that dials. opening: what it sends first."""

    def __init__(self, purpose: str, token: str, claims: tuple[str, ...] = ()) -> None:
        self._purpose, self._token, self._claims, self._nonce = purpose, token, claims, new_nonce()
        self.opening = MAGIC + bytes.fromhex(self._nonce)

    def check(self, answer: bytes) -> tuple[bytes, Handshake]:
        """Check the server's proof; the client's own, and the handshake. Raises `ProofError`.

        answer: `ANSWER_BYTES` of the server.
        """
        nonce = _nonce_of(answer)
        handshake = Handshake(self._purpose, self._token, self._nonce, nonce, self._claims)
        if not handshake.is_proven("server", answer[OPENING_BYTES:].hex()):
            raise ProofError("it does not know the token")
        return bytes.fromhex(handshake.proof("client")), handshake


class ServerProof:
    """The end that listens. answer: what it sends once it has read the opening, `OPENING_BYTES` of the client."""

    def __init__(self, purpose: str, token: str, opening: bytes, claims: tuple[str, ...] = ()) -> None:
        """Raises `ProofError`: it is not an opening."""
        nonce = new_nonce()
        self._handshake = Handshake(purpose, token, _nonce_of(opening), nonce, claims)
        self.answer = MAGIC + bytes.fromhex(nonce + self._handshake.proof("server"))

    def check(self, proof: bytes) -> Handshake:
        """Check the client's proof. Raises `ProofError`."""
        if not self._handshake.is_proven("client", proof.hex()):
            raise ProofError("it does not know the token")
        return self._handshake


def _nonce_of(beginning: bytes) -> str:
    if not beginning.startswith(MAGIC) or len(beginning) < OPENING_BYTES:
        raise ProofError("it speaks another protocol")
    return beginning[len(MAGIC) : OPENING_BYTES].hex()
