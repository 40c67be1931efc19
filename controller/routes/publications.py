"""`/v1/publications`: weight versions, published by the trainer and awaited by rollout replicas."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.auth import ANYBODY, POLICY
from controller.routes.base import Since, WaitSeconds, json_body, nothing, read, reply, unless_gone
from controller.service import Controller
from schema.wire import messages as m
from schema.wire.weights import Publication


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/publications", tags=["weights"])
    tokens, training = controller.tokens, controller.training

    @api.post("", responses={200: {"model": m.PublishReply}}, openapi_extra=json_body(m.PublishRequest))
    async def publish(request: Request) -> Response:
        tokens.require(request, POLICY)
        return reply(await training.publish(await read(request, m.PublishRequest)))

    @api.get("/latest", responses={200: {"model": Publication}, 204: {"description": "nothing newer"}})
    async def latest(request: Request, newer_than: Since = 0, wait_s: WaitSeconds = 0.0) -> Response:
        tokens.require(request, ANYBODY)
        publication = await unless_gone(request, training.latest_publication(newer_than, wait_s))
        return nothing() if publication is None else reply(publication)

    return api
