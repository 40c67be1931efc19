"""The proof that a client demands on each new connection to an http:// controller, before its first request.

    connect ─▶ GET /v1/proof: a nonce, the address that was dialled ─▶ a proof under this client's token? ─▶ requests

Requests carry the token of their role, the secret of a replica, samples. None of it goes to a process that listens at
the controller's address without knowing the token: one that took the port over, or one that a stale file leads to.
Where client and controller are on one machine the proof must also come from the port that was dialled (and where a
name was dialled, from the address that it led to), so no other process there can pass the question on to the genuine
controller. A loopback address that is dialled by number may lead to a forward of the same port (`ssh -L`): it is
believed, so a process that takes such a forward's port over can pass the question on. Across machines a process on
the way can do that: only TLS helps against it.

`connection.connect_tcp.complete` of httpcore's `trace` extension hands over the stream of a new connection.
"""

from __future__ import annotations

import ipaddress
import time
from typing import Any
from urllib.parse import urlencode

import h11
import httpcore
import httpx
from pydantic import ValidationError

from schema.util.host import has_address
from schema.util.proof import new_nonce
from schema.wire.messages import Problem
from schema.wire.messages.proof import PATH, ProofReply, ProofRequest, handshake

CONNECTED = "connection.connect_tcp.complete"
SECONDS = 10.0
"""For the whole exchange, as long as for the connection itself: it is one round trip."""
MOST_BYTES = 16 * 1024
"""Largest answer that is read; a genuine one has some six hundred bytes."""


class Unproven(Exception):
    """The server that listens there did not prove that it is the controller; nothing but a nonce was sent to it."""

    is_answer = False
    """Whether it answers as a controller does, so that the token or the address of this client may be wrong."""


class WrongProof(Unproven):
    """A controller answers, and it does not have this client's token."""

    is_answer = True


class Relayed(Unproven):
    """A controller that has the token answers, through another process of this machine."""

    is_answer = True


class Question:
    """One exchange, without input and output: what to send, then what was received until it is complete."""

    def __init__(self, url: str, token: str) -> None:
        parsed = httpx.URL(url)
        host = parsed.raw_host.decode()
        self._name, self._token = parsed.host, token
        self._dialled = f"[{host}]" if ":" in host else host
        self._port, self._path = parsed.port or 80, parsed.path.rstrip("/")
        self._asked = ProofRequest(nonce=new_nonce(), dialled=f"{self._dialled}:{self._port}")
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_BYTES)
        self._give_up = time.monotonic() + SECONDS
        self._status, self._body, self._received = 0, b"", 0

    @property
    def request(self) -> bytes:
        """The bytes to send."""
        target = f"{self._path}{PATH}?{urlencode(self._asked.model_dump())}"
        headers = [("host", self._asked.dialled), ("accept", "application/json")]
        head = self._http.send(h11.Request(method="GET", target=target, headers=headers))
        return (head or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    @property
    def seconds_left(self) -> float:
        """Until this is given up. Raises `Unproven`."""
        left = self._give_up - time.monotonic()
        if left <= 0:
            raise _late()
        return left

    def receive(self, data: bytes) -> bool:
        """Take what was received; True when the answer is complete. Raises `Unproven`."""
        self._received += len(data)
        if self._received > MOST_BYTES:
            raise Unproven(f"its answer is longer than {MOST_BYTES} bytes")
        try:
            self._http.receive_data(data)
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    return False
                if isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.Data):
                    self._body += event.data
                elif not isinstance(event, h11.InformationalResponse):
                    return True
        except h11.RemoteProtocolError:
            raise Unproven("it closes the connection" if not data else "its answer is not HTTP") from None

    def judge(self, own: Any, peer: Any) -> None:
        """Check the whole answer. own, peer: socket addresses of both ends as this one sees them.

        Raises `Unproven` and its kinds.
        """
        if self._status != 200:
            raise Unproven(f"it answers with HTTP {self._status}{_detail(self._body)}")
        try:
            reply = ProofReply.model_validate_json(self._body)
        except ValidationError:
            raise Unproven("its answer is not a proof") from None
        hand = handshake(self._token, self._asked, reply.nonce, reply.host, reply.port)
        if not any(hand.is_proven("server", proof) for proof in reply.proofs):
            raise WrongProof("it is a controller that does not have this token")
        self._judge_way(own, peer, reply)
        if self._http.their_state is not h11.DONE or self._http.trailing_data[0]:
            raise Unproven("it does not keep the connection for requests")

    def _judge_way(self, own: Any, peer: Any, reply: ProofReply) -> None:
        """Raises `Relayed`: both ends are on one machine, and the controller was reached elsewhere than dialled."""
        own_ip, dialled, arrived = _ip(own[0]), _ip(peer[0]), _ip(reply.host)
        # Of several addresses of this machine another one may be that from which it dials.
        if dialled is None or not (dialled.is_loopback or dialled == own_ip or has_address(peer[0])):
            return
        is_forwardable = dialled.is_loopback and _ip(self._name) is not None
        if reply.port == peer[1] and (is_forwardable or arrived == dialled):
            return
        at = f"[{reply.host}]:{reply.port}" if ":" in reply.host else f"{reply.host}:{reply.port}"
        raise Relayed(
            f"another process of this machine passes calls on to the controller, which was reached at {at} "
            f"and not at {self._asked.dialled}: dial the controller itself, forward the same port and dial it by "
            f"number (http://127.0.0.1:{reply.port}), or let the controller serve https (controller.tls_cert)"
        )


def ask(stream: httpcore.NetworkStream, url: str, token: str) -> None:
    """Demand the proof on a new connection; it is closed without one. Raises `Unproven` and its kinds."""
    question = Question(url, token)
    try:
        try:
            stream.write(question.request, question.seconds_left)
            while not question.receive(stream.read(MOST_BYTES, question.seconds_left)):
                pass
        except httpcore.TimeoutException:
            raise _late() from None
        except httpcore.NetworkError as error:
            raise Unproven(f"it closes the connection: {error}") from None
        question.judge(stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr"))
    except BaseException:
        stream.close()
        raise


async def ask_async(stream: httpcore.AsyncNetworkStream, url: str, token: str) -> None:
    """Ask as `ask` does."""
    question = Question(url, token)
    try:
        try:
            await stream.write(question.request, question.seconds_left)
            while not question.receive(await stream.read(MOST_BYTES, question.seconds_left)):
                pass
        except httpcore.TimeoutException:
            raise _late() from None
        except httpcore.NetworkError as error:
            raise Unproven(f"it closes the connection: {error}") from None
        question.judge(stream.get_extra_info("client_addr"), stream.get_extra_info("server_addr"))
    except BaseException:
        await stream.aclose()
        raise


def _late() -> Unproven:
    return Unproven(f"it gives no proof within {SECONDS:g} s")


def _detail(body: bytes) -> str:
    try:
        return f": {Problem.model_validate_json(body).detail}"
    except ValidationError:
        return ""


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address; IPv4 in IPv6 is IPv4. None: it is not one, but a name."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
