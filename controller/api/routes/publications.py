"""`/v1/publications`: weight versions, published by the trainer and awaited by rollout replicas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from controller.api.auth import ANYBODY, POLICY, ROLLOUT, USER, require, require_own
from controller.api.openapi import models, takes
from controller.api.routes.base import (
    Since,
    WaitSeconds,
    new_router,
    nothing,
    read,
    reply,
    reply_list,
    reply_or_nothing,
    unless_gone,
)  # fmt: skip
from controller.services.controller import Controller
from schema.wire import messages as m
from schema.wire.weights import Publication

ReplicaId = Annotated[
    str, Query(max_length=256, description="The rollout replica that asks: what it is handed is kept for it.")
]
PublicationId = Annotated[int, Path(ge=1, lt=2**53)]


def router(controller: Controller) -> APIRouter:
    api = new_router("publications", "/v1/publications")
    service, registry = controller.publications, controller.job.registry

    @api.get("", **models(list[m.PublicationInfo]))
    async def publications(request: Request) -> Response:
        """The newest publications and what replicas reported of them, oldest first."""
        require(request, USER)
        return reply_list(m.PublicationInfo, service.recent())

    @api.post("", **models(m.PublishReply, m.PublishRequest))
    async def publish(request: Request) -> Response:
        require(request, POLICY)
        return reply(await service.publish(await read(request, m.PublishRequest)))

    @api.get("/latest", **models(Publication, responses={204: {"description": "nothing newer"}}))
    async def latest(
        request: Request,
        newer_than: Since = 0,
        wait_s: WaitSeconds = 0.0,
        replica_id: ReplicaId = "",
        incarnation: Since = 0,
    ) -> Response:
        require(request, ANYBODY)
        if replica_id:
            require_own(request, registry, replica_id)
        waiting = service.latest(newer_than, wait_s, replica_id, incarnation)
        return reply_or_nothing(await unless_gone(request, waiting))

    @api.post("/{publication_id}/reports", status_code=204, **takes(m.UpdateReport))
    async def report(request: Request, publication_id: PublicationId) -> Response:
        require(request, ROLLOUT)
        body = await read(request, m.UpdateReport)
        require_own(request, registry, body.replica_id)
        await service.report(publication_id, body)
        return nothing()

    return api
