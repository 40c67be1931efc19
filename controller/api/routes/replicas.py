"""`/v1/replicas`: register, beat, drain, leave; and what the launcher saw of a process."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from controller.api.routes.base import Identifier, Reason, Since, json_body, nothing, read, reply, reply_list
from controller.services.auth import ANYBODY, POLICY, REPLICAS, ROLLOUT, USER
from controller.services.controller import Controller
from controller.services.errors import ProblemError
from schema.wire import messages as m
from schema.wire.history import DeclaredLeases, DeclareLeases, DeclareReply, DeclareRequest
from schema.wire.secret import REPLICA_HEADER, fault


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
        secret = request.headers.get(REPLICA_HEADER, "")
        if secret and (why := fault(secret)):
            raise ProblemError(m.ErrorCode.BAD_REQUEST, f"the header {REPLICA_HEADER} {why}")
        return reply(await membership.register(body, secret))

    @api.get("", responses={200: {"model": list[m.ReplicaInfo]}})
    async def list_replicas(request: Request) -> Response:
        tokens.require(request, USER)
        return reply_list(m.ReplicaInfo, controller.operations.replicas())

    @api.post("/by-name/{name:path}/exited", status_code=204)
    async def exited(
        request: Request, name: Identifier, reason: Reason = "", crashed: bool = True, parent_pid: Since = 0
    ) -> Response:
        tokens.require(request, USER)
        await membership.exited(name, reason, crashed=crashed, parent_pid=parent_pid)
        return nothing()

    @api.post(
        "/{replica_id}/heartbeat",
        responses={200: {"model": m.HeartbeatReply}},
        openapi_extra=json_body(m.HeartbeatRequest),
    )
    async def heartbeat(request: Request, replica_id: Identifier) -> Response:
        caller = tokens.require(request, REPLICAS)
        controller.require_own(request, caller, replica_id)
        return reply(await membership.heartbeat(replica_id, await read(request, m.HeartbeatRequest)))

    @api.post(
        "/{replica_id}/declare",
        responses={200: {"model": DeclareReply}},
        openapi_extra=json_body(DeclareRequest),
    )
    async def declare(request: Request, replica_id: Identifier) -> Response:
        tokens.require(request, POLICY)
        return reply(await controller.declaring.declare(replica_id, await read(request, DeclareRequest)))

    @api.post(
        "/{replica_id}/leases",
        responses={200: {"model": DeclaredLeases}},
        openapi_extra=json_body(DeclareLeases),
    )
    async def leases(request: Request, replica_id: Identifier) -> Response:
        caller = tokens.require(request, ROLLOUT)
        controller.require_own(request, caller, replica_id)
        return reply(await membership.declare_leases(replica_id, await read(request, DeclareLeases)))

    @api.post("/{replica_id}/drain", responses={200: {"model": m.DrainReply}})
    async def drain(request: Request, replica_id: Identifier) -> Response:
        caller = tokens.require(request, ANYBODY)
        controller.require_own(request, caller, replica_id)
        return reply(await membership.drain(replica_id))

    @api.delete("/{replica_id}", status_code=204)
    async def leave(
        request: Request, replica_id: Identifier, incarnation: Since, reason: Reason = ""
    ) -> Response:
        caller = tokens.require(request, REPLICAS)
        controller.require_own(request, caller, replica_id)
        await membership.leave(replica_id, incarnation, reason)
        return nothing()

    return api
