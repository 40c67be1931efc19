"""`/v1/steps`: batches and commits of the trainer, records for everybody."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.routes.base import (
    FRAME_ANSWER,
    Number,
    Since,
    WaitSeconds,
    frame_reply,
    json_body,
    nothing,
    read,
    reply,
    reply_list,
    unless_gone,
)
from controller.services.auth import POLICY, USER
from controller.services.controller import Controller
from controller.services.errors import ProblemError
from schema.wire import messages as m
from schema.wire.history import ReplayRequest


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/steps", tags=["policy"])
    tokens, training = controller.tokens, controller.training

    @api.get("/{step}/batch", responses={**FRAME_ANSWER, 204: {"description": "not ready yet"}})
    async def batch(
        request: Request, step: Number, policy_epoch: Since, samples: str = "all", wait_s: WaitSeconds = 0.0
    ) -> Response:
        tokens.require(request, POLICY)
        data = await unless_gone(request, training.batch(step, policy_epoch, _rows(samples), wait_s))
        return nothing() if data is None else frame_reply(data)

    @api.post(
        "/{step}/commit",
        responses={200: {"model": m.CommitReply}},
        openapi_extra=json_body(m.CommitRequest),
    )
    async def commit(request: Request, step: Number) -> Response:
        tokens.require(request, POLICY)
        return reply(await training.commit(step, await read(request, m.CommitRequest)))

    @api.post(
        "/{step}/replay",
        responses={200: {"model": m.CommitReply}},
        openapi_extra=json_body(ReplayRequest),
    )
    async def replay(request: Request, step: Number) -> Response:
        tokens.require(request, POLICY)
        return reply(await controller.declaring.replay(step, await read(request, ReplayRequest)))

    @api.get("", responses={200: {"model": list[m.StepRecord]}})
    async def records(request: Request, since: Since = 0) -> Response:
        tokens.require(request, USER)
        return reply_list(m.StepRecord, controller.job.steps.since(since))

    return api


MOST_ROWS = 65_536
"""Of one request: of a longer list the rest is no number."""


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
        raise ProblemError(m.ErrorCode.BAD_REQUEST, detail) from None
