"""`/v1/publications`: weight versions, published by the trainer and awaited by rollout replicas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from controller.api.routes.base import (
    Since,
    WaitSeconds,
    json_body,
    nothing,
    read,
    reply,
    reply_list,
    unless_gone,
)
from controller.services.auth import ANYBODY, POLICY, ROLLOUT, USER
from controller.services.controller import Controller
from schema.wire import messages as m
from schema.wire.weights import Publication

ReplicaId = Annotated[
    str, Query(max_length=256, description="The rollout replica that asks: what it is handed is kept for it.")
]
PublicationId = Annotated[int, Path(ge=1, lt=2**53)]


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/publications", tags=["weights"])
    tokens, publishing = controller.tokens, controller.publishing

    @api.get("", responses={200: {"model": list[m.PublicationInfo]}})
    async def publications(request: Request) -> Response:
        """The newest publications and what replicas reported of them, oldest first."""
        tokens.require(request, USER)
        return reply_list(m.PublicationInfo, publishing.recent())

    @api.post("", responses={200: {"model": m.PublishReply}}, openapi_extra=json_body(m.PublishRequest))
    async def publish(request: Request) -> Response:
        tokens.require(request, POLICY)
        return reply(await publishing.publish(await read(request, m.PublishRequest)))

    @api.get("/latest", responses={200: {"model": Publication}, 204: {"description": "nothing newer"}})
    async def latest(
        request: Request,
        newer_than: Since = 0,
        wait_s: WaitSeconds = 0.0,
        replica_id: ReplicaId = "",
        incarnation: Since = 0,
    ) -> Response:
        caller = tokens.require(request, ANYBODY)
        if replica_id:
            controller.require_own(request, caller, replica_id)
        waiting = publishing.latest(newer_than, wait_s, replica_id, incarnation)
        publication = await unless_gone(request, waiting)
        return nothing() if publication is None else reply(publication)

    @api.post("/{publication_id}/reports", status_code=204, openapi_extra=json_body(m.UpdateReport))
    async def report(request: Request, publication_id: PublicationId) -> Response:
        caller = tokens.require(request, ROLLOUT)
        body = await read(request, m.UpdateReport)
        controller.require_own(request, caller, body.replica_id)
        await publishing.report(publication_id, body)
        return nothing()

    return api
