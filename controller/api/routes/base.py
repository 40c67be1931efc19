"""This module holds what all routers share: parameters and bodies in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from controller.cancellation import end
from controller.errors import ApiError
from schema.wire.frame import CONTENT_TYPE
from schema.wire.invalid import describe
from schema.wire.messages import ErrorCode

T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")

Number = Annotated[int, Path(ge=0, lt=2**53)]
"""A step, or the index of a sample, in a path."""
Since = Annotated[int, Query(ge=0, lt=2**53)]
Identifier = Annotated[str, Path(min_length=1, max_length=256)]
Reason = Annotated[str, Query(max_length=8192)]

MAX_WAIT = 60.0
"""Longest long-poll in seconds."""

WaitSeconds = Annotated[float, Query(ge=0.0, le=MAX_WAIT, description="Long-poll: how long it may be held open.")]


def new_router(concern: str, prefix: str = "") -> APIRouter:
    """A router without answers of FastAPI's own choice: what is not a model is a response that the route makes."""
    return APIRouter(prefix=prefix, tags=[concern], default_response_class=Response)


async def read(request: Request, kind: type[T]) -> T:
    """The JSON body as a model, parsed once. Raises `ApiError` (422) naming field, value and reason."""
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        detail = describe(error.errors(include_url=False))
        raise ApiError(ErrorCode.BAD_REQUEST, detail) from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R | None:
    """The result of `work`, or None, with `work` cancelled, when the caller hangs up before it is there."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await end((working, leaving))


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def reply(model: BaseModel) -> Response:
    """A model as JSON, without validating again what we made ourselves."""
    return Response(model.model_dump_json(), media_type="application/json")


def reply_or_nothing(model: BaseModel | None) -> Response:
    """A model as JSON; 204 without one: nothing newer, or the caller has left."""
    return nothing() if model is None else reply(model)


def reply_list(kind: type[T], models: list[T]) -> Response:
    return Response(TypeAdapter(list[kind]).dump_json(models), media_type="application/json")  # type: ignore[valid-type]


def frame_reply(data: bytes) -> Response:
    return Response(data, media_type=CONTENT_TYPE)


def nothing() -> Response:
    return Response(status_code=204)
