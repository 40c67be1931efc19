"""The client against a server that answers as it is told: what is tried again, and what is the caller's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from controller.client import AsyncClient, Client, ControllerError, ControllerLost, Refused, Unusable
from controller.client import calls as api
from schema.wire.messages.proof import PATH
from tests.support.proof import proof_of

PATIENCE = 60.0


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[str, list[int]]]:
    """A server that gives these answers in turn; its address, and those that are left."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            proof = proof_of(self.path, ["token"], server.server_address) if PATH in self.path else b""
            self.send_response(200 if proof else left.pop(0))
            self.send_header("content-length", str(len(proof)))
            self.end_headers()
            self.wfile.write(proof)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", left
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(url: str, patience: float, *, waits: bool) -> None:
    async def send() -> None:
        async with AsyncClient(url, "token", patience=patience) as client:
            await client.send(api.ready())

    if waits:
        with Client(url, "token", patience=patience) as client:
            client.send(api.ready())
    else:
        asyncio.run(send())


@pytest.mark.parametrize("waits", [True, False])
def test_what_may_be_over_soon_is_tried_again(waits: bool) -> None:
    with answering(503, 408, 502, 504, 200) as (url, left):
        ask(url, PATIENCE, waits=waits)
        assert left == []


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("status", "error"), [(409, Refused), (500, Refused), (503, ControllerLost)])
def test_without_patience_and_for_good_there_is_one_attempt(
    waits: bool, status: int, error: type[ControllerError]
) -> None:
    with answering(status, 200) as (url, left), pytest.raises(error):
        ask(url, 0.0 if status == 503 else PATIENCE, waits=waits)
    assert left == [200]


@pytest.mark.parametrize("url", ["", " , ", "localhost:80", "ftp://h", "http://", "http://h:99999", "http://h:x"])
def test_what_is_no_address_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(Unusable, match="address of a controller"):
        Client(f"http://h:1,{url}" if url.strip(" ,") else url, "token")


@pytest.mark.parametrize("token", ["a\nb", "ä", "a b", "a\0"])
def test_what_no_header_can_hold_is_no_token(token: str) -> None:
    with pytest.raises(Unusable, match="the token holds characters") as caught:
        Client("http://h:1", token)
    assert token not in str(caught.value)


def test_another_server_is_named_and_trouble_is_kept() -> None:
    with answering(503, 404) as (url, _), Client(url, "token", patience=PATIENCE) as client:
        with pytest.raises(Refused, match=f"{url}/ does not answer as a controller does: Not Found"):
            client.send(api.ready())
        assert client.trouble == ""
    with Client(url, "token") as client:
        with pytest.raises(ControllerLost):
            client.send(api.ready())
        assert "ConnectError" in client.trouble
