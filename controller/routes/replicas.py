"""`/v1/replicas`: register, beat, drain, leave; and what the launcher saw of a process."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.auth import ANYBODY, REPLICAS, USER
from controller.problems import ProblemError
from controller.routes.base import json_body, nothing, read, reply, reply_list
from controller.service import Controller
from schema.wire import messages as m


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/replicas", tags=["replicas"])
    tokens, membership = controller.tokens, controller.membership

    @api.post("", responses={200: {"model": m.RegisterReply}}, openapi_extra=json_body(m.RegisterRequest))
    async def register(request: Request) -> Response:
        caller = tokens.require(request, REPLICAS)
        body = await read(request, m.RegisterRequest)
        if body.role != caller:
            detail = f"the token of {caller} cannot register a {body.role} replica"
            raise ProblemError(m.ErrorCode.FORBIDDEN, detail)
        return reply(await membership.register(body))

    @api.get("", responses={200: {"model": list[m.ReplicaInfo]}})
    async def list_replicas(request: Request) -> Response:
        tokens.require(request, USER)
        return reply_list(m.ReplicaInfo, controller.operations.replicas())

    @api.post("/by-name/{name:path}/exited", status_code=204)
    async def exited(request: Request, name: str, reason: str = "") -> Response:
        tokens.require(request, USER)
        await membership.exited(name, reason)
        return nothing()

    @api.post(
        "/{replica_id}/heartbeat",
        responses={200: {"model": m.HeartbeatReply}},
        openapi_extra=json_body(m.HeartbeatRequest),
    )
    async def heartbeat(request: Request, replica_id: str) -> Response:
        caller = tokens.require(request, REPLICAS)
        controller.require_own(caller, replica_id)
        return reply(await membership.heartbeat(replica_id, await read(request, m.HeartbeatRequest)))

    @api.post("/{replica_id}/drain", responses={200: {"model": m.DrainReply}})
    async def drain(request: Request, replica_id: str) -> Response:
        caller = tokens.require(request, ANYBODY)
        controller.require_own(caller, replica_id)
        return reply(await membership.drain(replica_id))

    @api.delete("/{replica_id}", status_code=204)
    async def leave(request: Request, replica_id: str, incarnation: int, reason: str = "") -> Response:
        caller = tokens.require(request, REPLICAS)
        controller.require_own(caller, replica_id)
        await membership.leave(replica_id, incarnation, reason)
        return nothing()

    return api
