"""`/v1/autoscale`: how many rollout replicas there should be."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.auth import ANYBODY, USER, require
from controller.api.openapi import models
from controller.api.routes.base import new_router, read, reply
from controller.services.controller import Controller
from schema.wire.messages.autoscale import AutoscaleStatus, ScaleRequest


def router(controller: Controller) -> APIRouter:
    api = new_router("autoscale", "/v1")
    service = controller.autoscale

    @api.get("/autoscale", **models(AutoscaleStatus))
    async def status(request: Request) -> Response:
        """For KEDA's metrics-api: valueLocation `desired`, targetValue 1."""
        require(request, ANYBODY)
        return reply(service.status())

    @api.post("/autoscale", **models(AutoscaleStatus, ScaleRequest))
    async def scale(request: Request) -> Response:
        """Set the number by hand, within the limits of the configuration, or give it back."""
        require(request, USER)
        return reply(await service.request(await read(request, ScaleRequest)))

    return api
