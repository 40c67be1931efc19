"""`/v1/leases`: groups for rollout replicas."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.auth import ROLLOUT, require, require_own
from controller.api.openapi import models
from controller.api.routes.base import Identifier, new_router, read, reply, reply_or_nothing, unless_gone
from controller.services.controller import Controller
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = new_router("leases", "/v1/leases")
    service, registry = controller.leases, controller.job.registry

    @api.post("", **models(m.LeaseReply, m.LeaseRequest))
    async def lease(request: Request) -> Response:
        require(request, ROLLOUT)
        body = await read(request, m.LeaseRequest)
        require_own(request, registry, body.replica_id)
        first = await service.lease_now(body)
        if not service.may_wait(body, first):
            return reply(first)
        return reply_or_nothing(await unless_gone(request, service.lease_later(body, first)))

    @api.delete("/{lease_id}", **models(m.ReleaseReply))
    async def release(request: Request, lease_id: Identifier) -> Response:
        require(request, ROLLOUT)
        if (holder := service.holder(lease_id)) is not None:
            require_own(request, registry, holder)
        return reply(m.ReleaseReply(released=await service.release(lease_id)))

    return api
