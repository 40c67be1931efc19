"""`/v1/job`: status and operation; `/v1/validations`, `/v1/ledger` and `/v1/groups`: a look inside."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from controller.api.auth import ANYBODY, USER, require
from controller.api.openapi import OBJECT, OBJECTS, answers, models
from controller.api.routes.base import Identifier, Reason, new_router, reply, reply_list
from controller.ledger.group import GroupState
from controller.services.controller import Controller
from controller.services.job import Action
from schema.wire import messages as m

MAX_PAGE = 1000


def router(controller: Controller) -> APIRouter:
    api = new_router("job", "/v1")
    service = controller.job_service

    @api.get("/job", **models(m.JobStatus))
    async def status(request: Request) -> Response:
        require(request, ANYBODY)
        return reply(service.status())

    @api.post("/job/fail", **models(m.JobStatus))
    async def fail(request: Request, reason: Reason = "") -> Response:
        require(request, USER)
        return reply(await service.fail(reason))

    @api.post("/job/{action}", **models(m.JobStatus))
    async def operate(request: Request, action: Action) -> Response:
        require(request, USER)
        return reply(await service.operate(action))

    @api.get("/validations", **models(list[m.ValidationRecord]))
    async def validations(request: Request) -> Response:
        require(request, USER)
        return reply_list(m.ValidationRecord, list(controller.job.validation.records.values()))

    @api.get("/ledger", **models(m.LedgerStatus))
    async def ledger(request: Request) -> Response:
        require(request, USER)
        return reply(controller.job.progress.status())

    @api.get("/groups", responses=answers("application/json", "One object for each group.", OBJECTS))
    async def groups(
        request: Request,
        state: GroupState | None = None,
        offset: Annotated[int, Query(ge=0, lt=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    ) -> Response:
        """Groups in the order of the stream, without their samples' headers."""
        require(request, USER)
        page = service.groups(state, offset, limit)
        rows = [{"id": g.id, **g.to_record(), "samples": sorted(g.samples)} for g in page]
        return Response(json.dumps(rows), media_type="application/json")

    @api.get("/groups/{group_id}", responses=answers("application/json", "The group.", OBJECT))
    async def group(request: Request, group_id: Identifier) -> Response:
        """One group with the headers of its samples."""
        require(request, USER)
        group = controller.job.require_group(group_id)
        headers = {str(index): meta.header.model_dump() for index, meta in sorted(group.samples.items())}
        row = {"id": group.id, **group.to_record(), "samples": headers}
        return Response(json.dumps(row), media_type="application/json")

    return api
