from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.util.proof import Handshake, new_nonce
from schema.util.proof_exchange import (
    ANSWER_BYTES,
    MAGIC,
    OPENING_BYTES,
    PROOF_BYTES,
    ClientProof,
    ProofError,
    Seal,
    ServerProof,
)


def test_both_ends_come_to_the_same_keys() -> None:
    client = ClientProof("test", "token", ("a",))
    server = ServerProof("test", "token", client.opening, ("a",))
    assert (len(client.opening), len(server.answer)) == (OPENING_BYTES, ANSWER_BYTES)
    proof, handshake = client.check(server.answer)
    assert len(proof) == PROOF_BYTES
    assert server.check(proof) == handshake


@pytest.mark.parametrize(
    "other", [("another", "token", ("a",)), ("test", "another", ("a",)), ("test", "token", ("b",))]
)
def test_a_server_of_something_else_gets_no_proof(other: tuple[str, str, tuple[str, ...]]) -> None:
    client = ClientProof("test", "token", ("a",))
    purpose, token, claims = other
    with pytest.raises(ProofError, match="does not know the token"):
        client.check(ServerProof(purpose, token, client.opening, claims).answer)


@given(st.binary(max_size=2 * ANSWER_BYTES) | st.binary(max_size=ANSWER_BYTES).map(MAGIC.__add__))
def test_bytes_of_chance_prove_nothing(noise: bytes) -> None:
    client = ClientProof("test", "token")
    for answer in (noise, client.opening + noise, client.opening * 3):
        with pytest.raises(ProofError):
            client.check(answer)
    server = ServerProof("test", "token", client.opening)
    for proof in (noise, server.answer[-PROOF_BYTES:]):
        with pytest.raises(ProofError):
            server.check(proof)
    recorded, _ = client.check(server.answer)
    with pytest.raises(ProofError):  # of another connection
        ServerProof("test", "token", client.opening).check(recorded)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=6), st.data())
def test_a_seal_takes_messages_as_they_were_sent(bodies: list[bytes], data: st.DataObject) -> None:
    """What comes up to the first change is taken; from there on nothing is."""
    handshake = Handshake("test", "token", new_nonce(), new_nonce())
    sender, receiver = Seal(handshake, "client"), Seal(handshake, "client")
    sent = [(body, sender.mac(body)) for body in bodies]
    others = [*sent, (b"forged", bytes(PROOF_BYTES)), (bodies[0], Seal(handshake, "server").mac(bodies[0]))]
    arrived = data.draw(st.lists(st.sampled_from(others), max_size=8))
    taken = [receiver.holds(*one) for one in arrived]
    same = next((n for n, one in enumerate(arrived) if n >= len(sent) or one != sent[n]), len(arrived))
    assert taken == [True] * same + [False] * (len(arrived) - same)
