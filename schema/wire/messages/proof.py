"""How a controller proves that it has the tokens of the job, to a client that has sent nothing yet.

    client ── ProofRequest: its nonce, the address that it dialled ──▶ controller
    client ◀── ProofReply: a proof under each role's token ──────────── controller     the token follows only now

Both addresses are mixed into the proofs: the one that was dialled, and the one at which the connection has arrived.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schema.util.proof import NONCE_BYTES, Handshake
from schema.wire.messages.base import Message

PATH = "/v1/proof"
PURPOSE = "cosmos-launch controller, HTTP/1.1 without TLS"
MOST_PROOFS = 8
Nonce = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * NONCE_BYTES}}}$", max_length=2 * NONCE_BYTES)]
Address = Annotated[str, Field(max_length=300, pattern=r"^[!-~]*$")]


class ProofRequest(Message):
    nonce: Nonce = Field(description="Made for this connection, 16 bytes in hexadecimal.")
    dialled: Address = Field(description="host:port of the URL that the client uses.")


class ProofReply(Message):
    nonce: Nonce
    host: Address = Field(description="Address of the controller's end of this connection.")
    port: int = Field(ge=0, lt=2**16)
    proofs: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)]] = Field(
        max_length=MOST_PROOFS, description="HMAC-SHA256 under the token of each role."
    )


def handshake(token: str, request: ProofRequest, nonce: str, host: str, port: int) -> Handshake:
    """The handshake of one connection; nonce, host, port: the controller's."""
    return Handshake(PURPOSE, token, request.nonce, nonce, (request.dialled, host, str(port)))
