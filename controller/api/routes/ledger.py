"""`/v1/ledger` and `/v1/groups`: look inside."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from controller.api.routes.base import OBJECT, OBJECTS, Identifier, answers, reply
from controller.ledger.group import State
from controller.services.auth import USER
from controller.services.controller import Controller
from schema.wire import messages as m

MAX_PAGE = 1000


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1", tags=["ledger"])
    tokens, operations = controller.tokens, controller.operations

    @api.get("/ledger", responses={200: {"model": m.LedgerStatus}})
    async def ledger(request: Request) -> Response:
        tokens.require(request, USER)
        return reply(operations.ledger())

    @api.get("/groups", responses=answers("application/json", "One object for each group.", OBJECTS))
    async def groups(
        request: Request,
        state: State | None = None,
        offset: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> Response:
        """Groups in the order of the stream, without their samples' headers."""
        tokens.require(request, USER)
        found = operations.groups(state, offset, limit)
        rows = [{"id": g.id, **g.to_record(), "samples": sorted(g.samples)} for g in found]
        return Response(json.dumps(rows), media_type="application/json")

    @api.get("/groups/{group_id}", responses=answers("application/json", "The group.", OBJECT))
    async def group(request: Request, group_id: Identifier) -> Response:
        """One group with the headers of its samples."""
        tokens.require(request, USER)
        found = operations.group(group_id)
        headers = {str(index): meta.header.model_dump() for index, meta in sorted(found.samples.items())}
        row = {"id": found.id, **found.to_record(), "samples": headers}
        return Response(json.dumps(row), media_type="application/json")

    return api
