"""`/v1/checkpoints`: what the trainer saved, and what it must save of the ledger."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.routes.base import Number, json_body, read, reply
from controller.services.auth import POLICY
from controller.services.controller import Controller
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/checkpoints", tags=["policy"])
    tokens = controller.tokens

    @api.post("", responses={200: {"model": m.CheckpointReply}}, openapi_extra=json_body(m.CheckpointRequest))
    async def checkpoint(request: Request) -> Response:
        tokens.require(request, POLICY)
        return reply(await controller.training.checkpoint(await read(request, m.CheckpointRequest)))

    @api.get("/{step}/ledger", responses={200: {"model": m.LedgerSnapshot}})
    async def snapshot(request: Request, step: Number) -> Response:
        tokens.require(request, POLICY)
        return reply(controller.job.progress.snapshot(step))

    return api
