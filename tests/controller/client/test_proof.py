"""Nothing but a nonce goes to a process that listens at the controller's address and does not have the token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from controller.client import AsyncClient, Client, ControllerLost, UnknownToken, Untrusted, http, proof
from controller.client import calls as api
from schema.util.host import has_address
from schema.wire.messages.proof import PATH, ProofReply, ProofRequest, handshake
from tests.controller.conftest import Stage
from tests.controller.drivers import make_frame, make_header
from tests.support import proof as support
from tests.support.controller import TOKENS
from tests.support.ports import free_port
from tests.support.proof import impostor, proof_of
from tests.support.waiting import PATIENCE, until

Answer = Callable[[str, tuple[Any, ...]], bytes | None]
TOKEN, SECRET, PROMPT = "a-token-that-only-this-test-has", "a-secret-of-one-replica", "what is 17 + 4?"
GOOD = [TOKEN]


def proven(head: str, address: tuple[Any, ...], tokens: list[str] = GOOD, *headers: str) -> bytes:
    """The whole answer of a controller that has these tokens."""
    return support.http(proof_of(head.split()[1], tokens, address), "200 OK", *headers)


def nonsense(proofs: list[str]) -> Answer:
    reply = ProofReply(nonce="0" * 32, host="127.0.0.1", port=1, proofs=proofs)
    return lambda head, address: support.http(reply.model_dump_json().encode())


NOT_A_CONTROLLER: dict[str, tuple[Answer, str]] = {
    "another program": (lambda *_: support.http(b"<html>", "404 Not Found"), "HTTP 404"),
    "without a token nothing": (lambda *_: support.http(b"{}", "401 Unauthorized"), "HTTP 401"),
    "too busy": (lambda *_: support.http(b"", "503 Service Unavailable"), "HTTP 503"),
    "not HTTP": (lambda *_: b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "its answer is not HTTP"),
    "hangs up": (lambda *_: b"", "closes the connection"),
    "cut": (lambda *where: proven(*where)[:-10] + b"", "gives no proof within 0.5 s"),
    "silent": (lambda *_: None, "gives no proof within 0.5 s"),
    "says yes": (lambda *_: support.http(b"true"), "is not a proof"),
    "another message": (lambda *_: support.http(b'{"nonce": 1}'), "is not a proof"),
    "a head without end": (lambda *_: b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 9000, "longer than|not HTTP"),
    "a body without end": (lambda *_: support.http(b" " * 100_000), "longer than 16384 bytes"),
    "keeps no connection": (lambda *where: proven(*where, GOOD, "connection: close"), "does not keep"),
    "says more than asked": (lambda *where: proven(*where) + support.http(b"{}"), "does not keep"),
}
NOT_THIS_TOKEN: dict[str, Answer] = {
    "none": nonsense([]),
    "made up": nonsense(["0" * 64]),
    "of another token": lambda *where: proven(*where, ["another-token-of-this-test"]),
    "of the address of another": lambda head, _: proven(head, ("127.0.0.1", 1)).replace(b'"port":1', b'"port":2'),
}  # fmt: skip


def push(client: Client | AsyncClient) -> Any:
    frame = make_frame(make_header(0, 0), answer=PROMPT)
    return client.send(api.push("group", "lease", 0, frame, "rollout-0.1"))


def ask(url: str, *, waits: bool, patience: float = 0.0) -> None:
    """Push a sample with a token and a secret."""

    async def send() -> None:
        async with AsyncClient(url, TOKEN, secret=SECRET, patience=patience) as client:
            await push(client)

    if waits:
        with Client(url, TOKEN, secret=SECRET, patience=patience) as client:
            push(client)
    else:
        asyncio.run(send())


def assert_only_asked(received: bytes) -> None:
    """All that was sent are questions for a proof."""
    heads = received.decode("latin-1").split("\r\n\r\n")
    assert heads.pop() == ""
    assert heads
    assert all(head.startswith(f"GET {PATH}?nonce=") for head in heads)
    for secret in (TOKEN, SECRET, PROMPT, "uthorization", *TOKENS.values()):
        assert secret.encode() not in received


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_not_a_controller_gets_nothing_and_is_named(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SECONDS", 0.5)
    for answer, words in NOT_A_CONTROLLER.values():
        with impostor(answer) as there:
            with pytest.raises(ControllerLost, match=f"what listens at {there.url} .*{words}"):
                ask(there.url, waits=waits)
            assert_only_asked(there.received)


@pytest.mark.parametrize("waits", [True, False])
def test_a_controller_without_this_token_ends_the_first_contact(waits: bool) -> None:
    """Token or address are wrong, and waiting would change nothing."""
    for answer in NOT_THIS_TOKEN.values():
        with impostor(answer) as there:
            with pytest.raises(UnknownToken, match=r"not sent.*\.tokens.*controller\.json") as caught:
                ask(there.url, waits=waits, patience=PATIENCE)
            assert "HTTP 401" not in str(caught.value)
            assert_only_asked(there.received)


def test_of_several_addresses_all_are_tried_before_the_token_is_wrong(stage: Stage) -> None:
    served = stage.serve()
    token = TOKENS["user"]
    with impostor(nonsense(["0" * 64])) as wrong, Client(f"{wrong.url},{served.url}", token) as client:
        assert client.send(api.job()).step == 0
        assert client.url == served.url
        assert_only_asked(wrong.received)


def test_no_process_of_this_machine_can_pass_the_question_on() -> None:
    """It reaches the controller at the controller's port, and that is what the proof says."""
    elsewhere = ("127.0.0.1", free_port())
    with impostor(lambda head, _: proven(head, elsewhere)) as there:
        with pytest.raises(Untrusted, match=f"reached at 127.0.0.1:{elsewhere[1]} and not at {there.url[7:]}"):
            ask(there.url, waits=True, patience=PATIENCE)
        assert_only_asked(there.received)


HERE, LAN, SECOND, FAR = "127.0.0.1", "10.0.0.5", "10.0.0.6", "10.0.0.9"
"""SECOND: another address of this machine, which is dialled from the first one."""


@pytest.mark.parametrize(
    ("url", "own", "there", "reached", "passes"),
    [
        (f"http://{HERE}:8000", HERE, (HERE, 8000), (HERE, 8000), True),
        (f"http://{HERE}:9000", HERE, (HERE, 9000), (HERE, 8000), False),
        (f"http://{HERE}:8000", HERE, (HERE, 8000), (FAR, 8000), True),  # ssh -L 8000:far:8000
        ("http://localhost:8000", "::1", ("::1", 8000), (HERE, 8000), False),  # another one is at ::1
        ("http://localhost:8000", HERE, (HERE, 8000), (HERE, 8000), True),
        ("http://[::1]:8000", "::1", ("::1", 8000), ("::1", 8000), True),
        ("http://localhost:8000", HERE, (HERE, 8000), ("::ffff:127.0.0.1", 8000), True),
        (f"http://{LAN}:8000", LAN, (LAN, 8000), (LAN, 8001), False),  # this machine by another address
        (f"http://{LAN}:8000", LAN, (LAN, 8000), (FAR, 8000), False),  # a stand-by's proof, passed on from here
        ("http://head:8000", LAN, (LAN, 8000), (FAR, 8000), False),
        (f"http://{SECOND}:8000", LAN, (SECOND, 8000), (SECOND, 8000), True),
        (f"http://{SECOND}:8000", LAN, (SECOND, 8000), (LAN, 8000), False),
        ("http://head:80", LAN, (FAR, 80), ("172.16.0.2", 8000), True),  # a Service of a cluster
        ("http://127.0.0.2:8000", HERE, ("127.0.0.2", 8000), (HERE, 8000), True),
    ],
)
def test_where_a_proof_may_come_from(
    url: str,
    own: str,
    there: tuple[str, int],
    reached: tuple[str, int],
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [has_address(name) for name in (HERE, "192.0.2.1")] == [True, False]
    monkeypatch.setattr(proof, "has_address", lambda name: name in (HERE, "::1", LAN, SECOND))
    question = proof.Question(url, TOKEN)
    assert question.receive(proven(question.request.decode(), reached))
    if passes:
        question.judge((own, 40000), there)
    else:
        with pytest.raises(proof.Relayed, match="forward the same port"):
            question.judge((own, 40000), there)


def test_a_controller_below_a_path_is_asked_there() -> None:
    assert proof.Question("http://gateway/job-a/", TOKEN).request.startswith(b"GET /job-a/v1/proof?nonce=")


def test_a_proof_is_of_one_connection_and_one_speaker() -> None:
    """What one question was answered with answers no other, and a client's proof is not a server's."""
    first, second = proof.Question("http://h:1", TOKEN), proof.Question("http://h:1", TOKEN)
    answer = proven(first.request.decode(), ("10.0.0.1", 1))
    assert second.request
    assert second.receive(answer)
    with pytest.raises(proof.WrongProof):
        second.judge(("10.0.0.2", 2), ("10.0.0.1", 1))
    asked = ProofRequest(nonce="1" * 32, dialled="h:1")
    hand = handshake(TOKEN, asked, "2" * 32, "h", 1)
    assert not hand.is_proven("server", hand.proof("client"))


@pytest.mark.parametrize("waits", [True, False])
def test_a_port_that_was_taken_over_gets_nothing_until_the_controller_is_back(stage: Stage, waits: bool) -> None:
    """The same client object goes on with the call that it could not make, whatever the impostor answers."""
    served = stage.serve()
    port, took = int(served.url.rpartition(":")[2]), []

    def again(client: Client | AsyncClient) -> Any:
        return client.send(api.job())

    async def both_async() -> int:
        async with AsyncClient(served.url, TOKENS["user"], patience=PATIENCE) as client:
            await again(client)
            await asyncio.to_thread(take_over)
            return (await again(client)).step  # type: ignore[no-any-return]

    def both() -> int:
        with Client(served.url, TOKENS["user"], patience=PATIENCE) as client:
            again(client)
            take_over()
            return again(client).step  # type: ignore[no-any-return]

    def take_over() -> None:
        served.stop()
        took.append(support.Impostor(answers, port=port))

    kinds = [NOT_THIS_TOKEN["made up"], NOT_A_CONTROLLER["another program"][0]]

    def answers(head: str, address: tuple[Any, ...]) -> bytes | None:
        return kinds[took[0].connections % 2](head, address)

    def give_back() -> None:
        until(lambda: took and took[0].connections > 3, "attempts at the impostor")
        took[0].close()
        served.restart()

    returning = threading.Thread(target=give_back)
    returning.start()
    try:
        assert (both() if waits else asyncio.run(both_async())) == 0
    finally:
        returning.join(PATIENCE)
    assert_only_asked(took[0].received)


def test_a_new_connection_costs_one_question_and_a_kept_one_none(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = stage.serve()
    asked: list[str] = []

    class Counted(proof.Question):
        def __init__(self, url: str, token: str) -> None:
            super().__init__(url, token)
            asked.append(url)

    monkeypatch.setattr(proof, "Question", Counted)
    with served.client() as client:
        for _ in range(5):
            client.send(api.job())
    assert asked == [served.url]


def test_without_a_bearer_nothing_is_learned_but_the_proof(stage: Stage) -> None:
    """And what is asked wrongly, or with a body, is refused by name."""
    served = stage.serve()
    nonce = "0123456789abcdef" * 2
    with httpx.Client(base_url=served.url, trust_env=False) as plain:
        answer = plain.get(PATH, params={"nonce": nonce, "dialled": "h:1"})
        reply = ProofReply.model_validate_json(answer.content)
        asked = ProofRequest(nonce=nonce, dialled="h:1")
        for token in TOKENS.values():
            hand = handshake(token, asked, reply.nonce, reply.host, reply.port)
            assert sum(hand.is_proven("server", found) for found in reply.proofs) == 1
            assert token not in answer.text
        assert answer.headers["cache-control"] == "no-store"
        assert plain.get(PATH, params={"nonce": nonce, "dialled": "h:1"}).json()["nonce"] != reply.nonce
        for params in ({}, {"nonce": nonce}, {"nonce": "x", "dialled": ""}, {"nonce": nonce, "dialled": "h" * 301},
                       {"nonce": nonce, "dialled": "h", "more": "1"}):  # fmt: skip
            assert plain.get(PATH, params=params).status_code == 422
        refused = plain.request("GET", PATH, params={"nonce": nonce, "dialled": "h:1"}, content=b"x")
        assert (refused.status_code, refused.headers["connection"]) == (413, "close")
        assert plain.post(PATH).status_code == 405


def test_the_process_remembers_that_its_token_was_proven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new client of the same process, as a thread or a retry makes one, waits for the controller too."""
    monkeypatch.setattr(http, "PROVEN", set())
    served = stage.serve()
    with impostor(NOT_THIS_TOKEN["made up"]) as there:
        for error in (UnknownToken, ControllerLost):
            with pytest.raises(error), Client(there.url, TOKENS["user"]) as client:
                client.send(api.job())
            with served.client() as client:
                client.send(api.job())
