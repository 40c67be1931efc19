"""The short way of hot calls answers as the framework does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from controller.api.app import HOT, FastPath
from controller.errors import ApiError
from controller.services import errors as problems
from schema.wire.messages import ErrorCode
from tests.controller.conftest import Stage

ROUTES = (("POST", "/things"), ("POST", "/things/{name}/beat"))


def make_app() -> FastAPI:
    app = FastAPI()
    problems.install(app)

    @app.post("/things")
    async def things(request: Request) -> Response:
        return PlainTextResponse(await request.body())

    @app.post("/things/{name}/beat")
    async def beat(request: Request, name: str) -> Response:
        if name == "wrong":
            raise ApiError(ErrorCode.CONFLICT, "wrong name", retry_after=1)
        if name == "bug":
            raise RuntimeError("secret")
        return PlainTextResponse(name)

    return app


def ask(app: ASGIApp, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [], "http_version": "1.1", "scheme": "http", "server": ("x", 80), "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/things"), ("POST", "/things/a/beat"), ("POST", "/things/wrong/beat"), ("GET", "/things"),
        ("POST", "/things/a/b/beat"), ("POST", "/things//beat"), ("POST", "/things/beat"), ("POST", "/nothing"),
    ],
)  # fmt: skip
def test_both_ways_give_the_same_answer(method: str, path: str) -> None:
    app = make_app()
    assert ask(FastPath(app, ROUTES), method, path, b"body") == ask(app, method, path, b"body")


def test_a_bug_is_a_problem_without_details() -> None:
    status, body = ask(FastPath(make_app(), ROUTES), "POST", "/things/bug/beat")
    assert status == 500
    assert b"secret" not in body
    assert b"RuntimeError" in body


def test_all_hot_routes_exist(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    assert HOT
    assert rollout.lease(1).groups
    assert rollout.beat().committed_steps == trainer.beat().committed_steps == 0
