"""The FastAPI application around one controller."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from controller import problems
from controller.limits import BodyLimit
from controller.routes import (
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
from controller.service import Controller

ROUTERS = (replicas, leases, samples, publications, steps, checkpoints, job, ledger, config, health)


def create_app(controller: Controller) -> ASGIApp:
    """The application, with problem documents for all errors and a limit on bodies."""
    app = FastAPI(title="cosmos-launch controller", docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app)
    for module in ROUTERS:
        app.include_router(module.router(controller))
    return BodyLimit(app, controller.job.config.controller.max_request_bytes)
