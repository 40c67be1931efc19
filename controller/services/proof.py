"""Proving to callers that this controller has the tokens of its job, before they send theirs."""

from __future__ import annotations

from collections.abc import Iterable

from schema.util.proof import new_nonce
from schema.wire.messages.proof import ProofReply, ProofRequest, handshake


class ProofService:
    """Answers before anything is known about the caller, so each answer is the same work: one HMAC for each role."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = tuple(tokens)

    def prove(self, asked: ProofRequest, host: str, port: int) -> ProofReply:
        """Prove each token. host, port: where the caller's connection has arrived."""
        nonce = new_nonce()
        proofs = [handshake(token, asked, nonce, host, port).proof("server") for token in self._tokens]
        return ProofReply(nonce=nonce, host=host, port=port, proofs=proofs)
