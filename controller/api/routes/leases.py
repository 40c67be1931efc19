"""`/v1/leases`: groups for rollout replicas."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.routes.base import Identifier, json_body, nothing, read, reply, unless_gone
from controller.services.auth import ROLLOUT
from controller.services.controller import Controller
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/leases", tags=["rollout"])
    tokens, leasing = controller.tokens, controller.leasing

    @api.post("", responses={200: {"model": m.LeaseReply}}, openapi_extra=json_body(m.LeaseRequest))
    async def lease(request: Request) -> Response:
        caller = tokens.require(request, ROLLOUT)
        body = await read(request, m.LeaseRequest)
        controller.require_own(request, caller, body.replica_id)
        first = await leasing.lease_now(body)
        if not leasing.may_wait(body, first):
            return reply(first)
        answer = await unless_gone(request, leasing.lease_later(body, first))
        return nothing() if answer is None else reply(answer)  # nobody reads the former

    @api.delete("/{lease_id}", responses={200: {"model": m.ReleaseReply}})
    async def release(request: Request, lease_id: Identifier) -> Response:
        caller = tokens.require(request, ROLLOUT)
        if (holder := leasing.holder(lease_id)) is not None:
            controller.require_own(request, caller, holder)
        return reply(m.ReleaseReply(released=await leasing.release(lease_id)))

    return api
