"""The FastAPI application around one controller."""

from __future__ import annotations

import json

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from controller.api.auth_middleware import Guard
from controller.api.fast_path import Express
from controller.api.leadership import Gate
from controller.api.limits import BodyLimit
from controller.api.openapi import document
from controller.api.routes import (
    checkpoints,
    config,
    health,
    job,
    leases,
    ledger,
    publications,
    replicas,
    samples,
    steps,
)
from controller.api.routes.base import OBJECT, answers
from controller.services import errors as problems
from controller.services.auth import USER
from controller.services.controller import Controller

ROUTERS = (replicas, leases, samples, publications, steps, checkpoints, job, ledger, config, health)


def build(controller: Controller) -> FastAPI:
    """All routes, with problem documents for all errors."""
    app = FastAPI(title="cosmos-launch controller", docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app)
    for module in ROUTERS:
        # No answer of FastAPI's own choice: what is no model is a response that the route makes.
        app.include_router(module.router(controller), default_response_class=Response)

    @app.get(
        "/v1/openapi.json", tags=["config"], responses=answers("application/json", "This document.", OBJECT)
    )
    async def described(request: Request) -> Response:
        controller.tokens.require(request, USER)
        return Response(json.dumps(document(app)), media_type="application/json")

    return app


def create_app(controller: Controller) -> ASGIApp:
    """The application, with a guard at the door and a limit on bodies."""
    app = build(controller)
    config, store = controller.job.config.controller, controller.job.store
    limited = BodyLimit(Express(app), store, config.max_request_bytes, config.max_buffered_bytes)
    return Guard(Gate(limited, store), controller.tokens)
