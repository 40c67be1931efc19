from __future__ import annotations

from dataclasses import replace

import pytest

from schema.util.proof import Handshake, new_nonce

HANDSHAKE = Handshake("test", "token", new_nonce(), new_nonce(), ("127.0.0.1", "80"))


def test_each_side_proves_the_token() -> None:
    assert HANDSHAKE.is_proven("server", HANDSHAKE.proof("server"))
    assert HANDSHAKE.is_proven("client", HANDSHAKE.proof("client"))
    assert HANDSHAKE.key("client") != HANDSHAKE.key("server")


def test_a_proof_of_one_side_is_not_one_of_the_other() -> None:
    assert not HANDSHAKE.is_proven("client", HANDSHAKE.proof("server"))
    assert not HANDSHAKE.is_proven("server", "")
    assert not HANDSHAKE.is_proven("server", "ü")


@pytest.mark.parametrize(
    "other",
    [
        replace(HANDSHAKE, token="another"),
        replace(HANDSHAKE, purpose="another"),
        replace(HANDSHAKE, client_nonce=new_nonce()),
        replace(HANDSHAKE, server_nonce=new_nonce()),
        replace(HANDSHAKE, client_nonce=HANDSHAKE.server_nonce, server_nonce=HANDSHAKE.client_nonce),
        replace(HANDSHAKE, claims=("127.0.0.1", "81")),
        replace(HANDSHAKE, claims=("127.0.0.18", "0")),
        replace(HANDSHAKE, claims=()),
    ],
)
def test_a_proof_holds_for_its_connection_alone(other: Handshake) -> None:
    assert not HANDSHAKE.is_proven("server", other.proof("server"))
