"""`/v1/job`: status and operation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.routes.base import Reason, reply, reply_list
from controller.services.auth import ANYBODY, USER
from controller.services.controller import Controller
from controller.services.job import Action
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1", tags=["job"])
    tokens, operations = controller.tokens, controller.operations

    @api.get("/job", responses={200: {"model": m.JobStatus}})
    async def status(request: Request) -> Response:
        tokens.require(request, ANYBODY)
        return reply(operations.status())

    @api.post("/job/fail", responses={200: {"model": m.JobStatus}})
    async def fail(request: Request, reason: Reason = "") -> Response:
        tokens.require(request, USER)
        return reply(await operations.fail(reason))

    @api.post("/job/{action}", responses={200: {"model": m.JobStatus}})
    async def operate(request: Request, action: Action) -> Response:
        tokens.require(request, USER)
        return reply(await operations.operate(action))

    @api.get("/validations", responses={200: {"model": list[m.ValidationRecord]}})
    async def validations(request: Request) -> Response:
        tokens.require(request, USER)
        validation = controller.job.validation
        return reply_list(m.ValidationRecord, [] if validation is None else list(validation.records.values()))

    return api
