"""`/v1/steps`, `/v1/checkpoints`, `…/member`: what trainers do with the controller; records for everybody."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.auth import POLICY, USER, require, require_own
from controller.api.openapi import FRAME_ANSWER, models
from controller.api.routes.base import (
    Identifier,
    Number,
    Since,
    WaitSeconds,
    frame_reply,
    new_router,
    nothing,
    read,
    reply,
    reply_list,
    reply_or_nothing,
    unless_gone,
)  # fmt: skip
from controller.errors import ApiError
from controller.services.controller import Controller
from schema.wire import messages as m
from schema.wire.messages.members import MemberReply, MemberRequest

MOST_ROWS = 65_536
"""The most rows of one request: the rest of a longer list is not read as numbers."""


def router(controller: Controller) -> APIRouter:
    api = new_router("steps", "/v1")
    service, job = controller.steps, controller.job

    @api.get("/steps/{step}/batch", responses={**FRAME_ANSWER, 204: {"description": "not ready yet"}})
    async def batch(
        request: Request,
        step: Number,
        policy_epoch: Since,
        samples: str = "all",
        wait_s: WaitSeconds = 0.0,
        ahead: bool = False,
    ) -> Response:
        """ahead: what it would be if the step before were committed now, which decides nothing."""
        require(request, POLICY)
        find = service.prefetch if ahead else service.batch
        data = await unless_gone(request, find(step, policy_epoch, _rows(samples), wait_s))
        return nothing() if data is None else frame_reply(data)

    @api.post("/steps/{step}/commit", **models(m.CommitReply, m.CommitRequest))
    async def commit(request: Request, step: Number) -> Response:
        require(request, POLICY)
        return reply(await service.commit(step, await read(request, m.CommitRequest)))

    @api.post("/replicas/{replica_id}/member", **models(MemberReply, MemberRequest))
    async def member(request: Request, replica_id: Identifier) -> Response:
        require(request, POLICY)
        require_own(request, job.registry, replica_id)
        body = await read(request, MemberRequest)
        return reply_or_nothing(await unless_gone(request, controller.members.ask(replica_id, body)))

    @api.get("/steps", **models(list[m.StepRecord]))
    async def records(request: Request, since: Since = 0) -> Response:
        require(request, USER)
        return reply_list(m.StepRecord, job.steps.since(since))

    @api.post("/checkpoints", **models(m.CheckpointReply, m.CheckpointRequest))
    async def checkpoint(request: Request) -> Response:
        require(request, POLICY)
        return reply(await service.checkpoint(await read(request, m.CheckpointRequest)))

    @api.get("/checkpoints/{step}/ledger", **models(m.LedgerSnapshot))
    async def snapshot(request: Request, step: Number) -> Response:
        """Return what a checkpoint that covers `step` committed steps must store of the ledger."""
        require(request, POLICY)
        return reply(job.ledger.snapshot(step))

    return api


def _rows(text: str) -> list[int] | None:
    """ "all" is None, "none" no row, else a list of rows such as "0,5,9"."""
    if text == "all":
        return None
    if text == "none":
        return []
    try:
        return [int(part) for part in text.split(",", MOST_ROWS)]
    except ValueError:
        detail = f"samples={text[:80]!r} is neither all, none, nor rows such as 0,5,9"
        raise ApiError(m.ErrorCode.BAD_REQUEST, detail) from None
