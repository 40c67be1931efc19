"""Mutual proof of a shared token over a channel that nobody has secured: neither side sends the token.

    client ── its nonce ───────────────▶ server
    client ◀── server's nonce, proof ─── server        the client stops here if the proof is wrong
    client ── proof ───────────────────▶ server

A proof is HMAC-SHA256 under the token over the purpose of the channel, the speaker, both nonces and what both sides
claim (`claims`: the address that was dialled, say). A proof of one purpose, speaker or connection is worth nothing in
another, so an impostor can neither replay one nor have the genuine process make one for it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

NONCE_BYTES = 16
Speaker = Literal["client", "server"]


def new_nonce() -> str:
    """A nonce in hexadecimal, fresh for each connection."""
    return secrets.token_hex(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class Handshake:
    """It holds what both sides of one connection mix into their proofs.

    purpose: of the channel, a constant of its protocol. claims: further facts that both sides must agree on.
    """

    purpose: str
    token: str
    client_nonce: str
    server_nonce: str
    claims: tuple[str, ...] = ()

    def proof(self, speaker: Speaker) -> str:
        """The proof that `speaker` sends, in hexadecimal."""
        return self._digest(speaker).hex()

    def is_proven(self, speaker: Speaker, proof: str) -> bool:
        """Whether `speaker` knows the token; compared in constant time."""
        return hmac.compare_digest(self.proof(speaker).encode(), proof.encode())

    def key(self, speaker: Speaker) -> bytes:
        """A key for the messages that `speaker` sends on this connection after both sides are proven (32 bytes)."""
        return self._digest(f"{speaker}'s messages")

    def _digest(self, what: str) -> bytes:
        # Each part is preceded by its length: no two lists of parts run together into the same bytes.
        parts = (self.purpose, what, self.client_nonce, self.server_nonce, *self.claims)
        message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
        return hmac.digest(self.token.encode(), message, hashlib.sha256)
