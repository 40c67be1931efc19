"""`/v1/session`, and what the pages of the dashboard show that no other route answers."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from controller.api.auth import SESSIONS, USER, require
from controller.api.openapi import OBJECT, answers, models
from controller.api.routes.base import Identifier, new_router, reply, reply_list
from controller.dashboard.session import Sessions
from controller.dashboard.view import MOST_LOG, RunView
from controller.services.controller import Controller
from schema.wire.messages import dashboard as d

MOST_POINTS = 5000
"""The most points of a curve: more than a screen has."""
MOST_CURVES = 32
Metric = Annotated[str, Query(min_length=1, max_length=128)]


def router(controller: Controller) -> APIRouter:
    job = controller.job
    name = job.config.logging.experiment_name or job.run_dir.name
    api = new_router("dashboard")
    for part in (sessions([d.ShownRun(name=name, base="/v1", live=True)]), views(controller.dashboard, "/v1")):
        api.routes.extend(part.routes)

    @api.get("/docs", status_code=307, responses={307: {"description": "The page of the dashboard."}})
    async def docs(request: Request) -> Response:
        """To the page that lists all calls."""
        require(request, USER)
        return RedirectResponse("/#/api")

    return api


def sessions(runs: list[d.ShownRun]) -> APIRouter:
    """Routes that exchange the user's token for a session cookie, and list the runs."""
    api, session_reply = new_router("dashboard", "/v1"), d.SessionReply(runs=runs)

    @api.post("/session", **models(d.SessionReply))
    async def begin(request: Request) -> Response:
        require(request, USER)
        response = reply(session_reply)
        _sessions(request).open(response, request.scope)
        return response

    @api.get("/session", **models(d.SessionReply))
    async def known(request: Request) -> Response:
        require(request, USER)
        return reply(session_reply)

    @api.delete("/session", responses={204: {"description": "The cookie is gone."}})
    async def leave(request: Request) -> Response:
        require(request, USER)
        response = Response(status_code=204)
        _sessions(request).close(response, request.scope)
        return response

    return api


def _sessions(request: Request) -> Sessions:
    open_sessions: Sessions = request.scope[SESSIONS]
    return open_sessions


def views(view: RunView, prefix: str) -> APIRouter:
    """The calls about one run."""
    api = new_router("dashboard", prefix)

    @api.get("/overview", **models(d.Overview))
    async def overview(request: Request) -> Response:
        """Status, ledger and replicas in one; all viewers together ask the job once a second."""
        require(request, USER)
        return Response(await view.overview(), media_type="application/json")

    @api.get("/curves", **models(d.Curves))
    async def curves(
        request: Request,
        metric: Annotated[list[Metric], Query(max_length=MOST_CURVES)] = [],  # noqa: B006 - never changed
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 1000,
    ) -> Response:
        """Metrics by step, and `validation` by version, thinned to about so many points."""
        require(request, USER)
        return reply(await view.curves(metric, points))

    @api.get("/timeline", **models(d.Timeline))
    async def timeline(request: Request) -> Response:
        """Return what happened to replicas, weights and the job, and when."""
        require(request, USER)
        return reply(await view.timeline())

    @api.get("/scaling", **models(d.Scaling))
    async def scaling(request: Request) -> Response:
        """How many rollout replicas were wanted, why, and how many were there."""
        require(request, USER)
        return reply(await view.scaling())

    @api.get("/samples/steps", **models(d.KeptSamples))
    async def kept(request: Request) -> Response:
        require(request, USER)
        return reply(await view.kept())

    @api.get("/logs", **models(list[d.LogFile]))
    async def logs(request: Request) -> Response:
        """Logs of the processes on the machine of the launcher."""
        require(request, USER)
        return reply_list(d.LogFile, await view.logs())

    @api.get("/logs/{name}", **models(d.LogText))
    async def log(
        request: Request, name: Identifier, tail: Annotated[int, Query(ge=1, le=MOST_LOG)] = MOST_LOG // 4
    ) -> Response:
        """The last `tail` bytes of a log."""
        require(request, USER)
        return reply(await view.log(name, tail))

    @api.get("/config/origins", responses=answers("application/json", "Origin by key.", OBJECT))
    async def origins(request: Request) -> Response:
        """Where the keys come from that do not have their defaults."""
        require(request, USER)
        return Response(json.dumps(await view.origins()), media_type="application/json")

    return api
