"""How replicas bring back what a store that lost history has forgotten (see `schema.wire.messages.recovery`)."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.auth import POLICY, ROLLOUT, require, require_own
from controller.api.openapi import models
from controller.api.routes.base import Identifier, Number, new_router, read, reply
from controller.services.controller import Controller
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = new_router("recovery", "/v1")

    @api.post("/replicas/{replica_id}/declare", **models(m.DeclareReply, m.DeclareRequest))
    async def declare(request: Request, replica_id: Identifier) -> Response:
        require(request, POLICY)
        return reply(await controller.recovery.declare(replica_id, await read(request, m.DeclareRequest)))

    @api.post("/replicas/{replica_id}/leases", **models(m.DeclaredLeases, m.DeclareLeases))
    async def leases(request: Request, replica_id: Identifier) -> Response:
        require(request, ROLLOUT)
        require_own(request, controller.job.registry, replica_id)
        body = await read(request, m.DeclareLeases)
        return reply(await controller.replicas.declare_leases(replica_id, body))

    @api.post("/steps/{step}/replay", **models(m.CommitReply, m.ReplayRequest))
    async def recommit(request: Request, step: Number) -> Response:
        require(request, POLICY)
        return reply(await controller.recovery.recommit(step, await read(request, m.ReplayRequest)))

    return api
