"""`/v1/events`: everything that happens in a job, as server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from controller.api.auth import USER, require
from controller.api.openapi import answers
from controller.api.routes.base import new_router
from controller.errors import ApiError
from controller.services.controller import Controller
from schema.wire.messages import ErrorCode, EventKind

MOST_DIGITS = 15
"""The most digits of the id of an event."""
STREAM = "text/event-stream"
EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("id", "event", "data")}}


def router(controller: Controller) -> APIRouter:
    api = new_router("events", "/v1")
    service = controller.events

    @api.get("/events", responses=answers(STREAM, "One `Event` as JSON in the data of each.", EVENT))
    async def events(
        request: Request,
        after: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        kind: Annotated[list[EventKind], Query(max_length=len(EventKind))] = [],  # noqa: B006 - never changed
        follow: bool = True,
    ) -> Response:
        """Events with ids above `after`, from the beginning of the run on; without `follow` those of the past alone.

        A browser that lost its connection goes on by the header `Last-Event-ID`.
        """
        require(request, USER)
        last = request.headers.get("last-event-id", "")
        if last and not (last.isascii() and last.isdecimal() and len(last) <= MOST_DIGITS):
            raise ApiError(ErrorCode.BAD_REQUEST, f"Last-Event-ID: {last[:40]!r} is not the id of an event")
        stream = service.stream(int(last) if last else after, kind, follow=follow)
        return StreamingResponse(stream, media_type=STREAM, headers={"cache-control": "no-store"})

    return api
