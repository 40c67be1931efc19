"""`/v1/replicas`: register, beat, be profiled, drain, leave; and what the launcher saw of a process."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from controller.api.auth import ANYBODY, POLICY, REPLICAS, USER, require, require_own
from controller.api.openapi import models, takes
from controller.api.routes.base import (
    Identifier,
    Reason,
    Since,
    WaitSeconds,
    new_router,
    nothing,
    read,
    reply,
    reply_list,
    reply_or_nothing,
    unless_gone,
)
from controller.errors import ApiError
from controller.services.controller import Controller
from schema.wire import messages as m
from schema.wire.messages.time_share import TurnReply, TurnRequest
from schema.wire.secret import REPLICA_HEADER, fault


def router(controller: Controller) -> APIRouter:
    api = new_router("replicas", "/v1/replicas")
    service, registry = controller.replicas, controller.job.registry

    @api.post("", **models(m.RegisterReply, m.RegisterRequest))
    async def register(request: Request) -> Response:
        caller = require(request, REPLICAS)
        body = await read(request, m.RegisterRequest)
        if body.role != caller:
            detail = f"the token of {caller} cannot register a {body.role} replica"
            raise ApiError(m.ErrorCode.FORBIDDEN, detail)
        secret = request.headers.get(REPLICA_HEADER, "")
        if secret and (why := fault(secret)):
            raise ApiError(m.ErrorCode.BAD_REQUEST, f"the header {REPLICA_HEADER} {why}")
        return reply(await service.register(body, secret))

    @api.get("", **models(list[m.ReplicaInfo]))
    async def list_replicas(
        request: Request, name: Annotated[str, Query(max_length=256, description="Only the one of this name.")] = ""
    ) -> Response:
        require(request, ANYBODY)
        return reply_list(m.ReplicaInfo, service.infos(name))

    @api.post("/by-name/{name:path}/exited", status_code=204)
    async def exited(
        request: Request, name: Identifier, reason: Reason = "", crashed: bool = True, parent_pid: Since = 0
    ) -> Response:
        require(request, USER)
        await service.exited(name, reason, crashed=crashed, parent_pid=parent_pid)
        return nothing()

    @api.post("/{replica_id}/heartbeat", **models(m.HeartbeatReply, m.HeartbeatRequest))
    async def heartbeat(request: Request, replica_id: Identifier) -> Response:
        require(request, REPLICAS)
        require_own(request, registry, replica_id)
        return reply(await service.heartbeat(replica_id, await read(request, m.HeartbeatRequest)))

    @api.post("/{replica_id}/turn", **models(TurnReply, TurnRequest))
    async def turn(request: Request, replica_id: Identifier) -> Response:
        require(request, REPLICAS)
        require_own(request, registry, replica_id)
        body = await read(request, TurnRequest)
        return reply_or_nothing(await unless_gone(request, service.turn(replica_id, body)))

    @api.post("/{replica_id}/drain", **models(m.DrainReply))
    async def drain(request: Request, replica_id: Identifier) -> Response:
        require(request, ANYBODY)
        require_own(request, registry, replica_id)
        return reply(await service.drain(replica_id))

    @api.post("/{replica_id}/profile", **models(m.ProfileStatus, m.ProfileRequest))
    async def profile(request: Request, replica_id: Identifier) -> Response:
        require(request, USER)
        return reply(await service.profile(replica_id, await read(request, m.ProfileRequest)))

    @api.delete("/{replica_id}", status_code=204)
    async def leave(request: Request, replica_id: Identifier, incarnation: Since, reason: Reason = "") -> Response:
        require(request, REPLICAS)
        require_own(request, registry, replica_id)
        await service.leave(replica_id, incarnation, reason)
        return nothing()

    @api.post("/meetings/{meeting_id}", status_code=204, **takes(m.Meeting))
    async def announce(request: Request, meeting_id: Identifier) -> Response:
        require(request, POLICY)
        service.announce(meeting_id, await read(request, m.Meeting))
        return nothing()

    @api.get("/meetings/{meeting_id}", **models(m.Meeting, responses={204: {"description": "rank 0 has not come"}}))
    async def find(request: Request, meeting_id: Identifier, wait_s: WaitSeconds = 0.0) -> Response:
        require(request, POLICY)
        return reply_or_nothing(await unless_gone(request, service.meeting(meeting_id, wait_s)))

    return api
