"""`/healthz`, `/readyz` and `/metrics`: for supervisors and Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from controller.api.auth import ANYBODY, require
from controller.api.metrics import JobCollector
from controller.api.openapi import answers
from controller.api.routes.base import new_router
from controller.services.controller import Controller
from controller.services.errors import problem
from schema.wire.messages import ErrorCode


def router(controller: Controller) -> APIRouter:
    api = new_router("health")
    registry = CollectorRegistry()
    registry.register(JobCollector(controller))

    @api.get("/healthz", responses=answers("text/plain", "ok"))
    async def healthz() -> Response:
        """The process answers."""
        return Response("ok\n", media_type="text/plain")

    @api.get("/readyz", responses=answers("text/plain", "ready"))
    async def readyz() -> Response:
        """It can take work: the store takes writes."""
        if not controller.job.store.available:
            why = controller.job.store.outage or "Redis does not take writes"
            return problem(ErrorCode.STORE_UNAVAILABLE, why, headers={"retry-after": "1"})
        return Response("ready\n", media_type="text/plain")

    @api.get("/metrics", responses=answers("text/plain", "Prometheus' text format."))
    async def metrics(request: Request) -> Response:
        """Prometheus metrics (with any token of the job)."""
        require(request, ANYBODY)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return api
