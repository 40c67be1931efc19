"""The FastAPI application around one controller, and what stands in front of it.

    request ─▶ Pages ─▶ AuthMiddleware ─▶ LeaderGate ─▶ BodyLimit ─▶ FastPath ─ hot path ──▶ the route's own function
                                                               └────── any other ─▶ FastAPI

The few calls that make up nearly all traffic go past the machinery of the framework. The functions are those that
FastAPI's routes call, and errors go to the application's own handlers, so the answer is the same either way, and the
OpenAPI document describes both. Only functions that take the request alone (and one part of the path) can go this
way: nothing here validates parameters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.api.auth import AuthMiddleware, JobTokens
from controller.api.leadership import LeaderGate
from controller.api.limits import BodyLimit
from controller.api.routes import (
    autoscale,
    config,
    dashboard,
    events,
    health,
    job,
    leases,
    proof,
    publications,
    recovery,
    replicas,
    samples,
    steps,
)
from controller.dashboard.pages import Pages
from controller.services import errors as problems
from controller.services.controller import Controller

CONCERNS = (
    *(replicas, leases, samples, publications, steps, recovery, job, autoscale),
    *(events, dashboard, config, health, proof),
)
HOT = (("POST", "/v1/leases"), ("POST", "/v1/samples"), ("POST", "/v1/replicas/{replica_id}/heartbeat"))
"""Method and path of the routes, as FastAPI knows them, with at most one parameter."""

Endpoint = Callable[..., Awaitable[Response]]


def build(controller: Controller) -> FastAPI:
    """All routes, with problem documents for all errors."""
    app = FastAPI(title="cosmos-launch controller", docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app)
    for concern in CONCERNS:
        # `include_router` would make each route anew.
        app.router.routes.extend(concern.router(controller).routes)
    return app


def create_app(controller: Controller, tokens: JobTokens) -> ASGIApp:
    """The application behind its middleware."""
    config, store = controller.job.config.controller, controller.job.store
    limited = BodyLimit(FastPath(build(controller)), store, config.max_request_bytes, config.max_buffered_bytes)
    return Pages(AuthMiddleware(LeaderGate(limited, store), tokens))


class FastPath:
    """ASGI middleware in front of `app`."""

    def __init__(self, app: FastAPI, hot: Iterable[tuple[str, str]] = HOT) -> None:
        self._app: ASGIApp = app
        self._handlers: dict[Any, Any] = app.exception_handlers
        self._exact: dict[tuple[str, str], Endpoint] = {}
        self._around: dict[tuple[str, str, str], tuple[str, Endpoint]] = {}
        """By method, what stands before the parameter and what after it: the parameter's name and the function."""
        endpoints = {
            (method, route.path): route.endpoint
            for route in app.routes
            if isinstance(route, APIRoute)
            for method in route.methods
        }
        for method, path in hot:
            before, brace, rest = path.partition("{")
            if brace:
                name, _, after = rest.partition("}")
                self._around[method, before, after] = name, endpoints[method, path]
            else:
                self._exact[method, path] = endpoints[method, path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint, parameters = self._find(scope["method"], scope["path"])
            if endpoint is not None:
                request = Request(scope, receive, send)
                try:
                    response = await endpoint(request, **parameters)
                except Exception as error:
                    response = await self._answer(request, error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find(self, method: str, path: str) -> tuple[Endpoint | None, dict[str, str]]:
        endpoint = self._exact.get((method, path))
        if endpoint is not None:
            return endpoint, {}
        for (known, before, after), (name, around) in self._around.items():
            if method == known and path.startswith(before) and path.endswith(after):
                value = path[len(before) : len(path) - len(after)]
                if value and "/" not in value:
                    return around, {name: value}
        return None, {}

    async def _answer(self, request: Request, error: Exception) -> Response:
        """Return what the application's handler of the nearest type makes of an error. Raises what has no handler."""
        for kind in type(error).__mro__:
            handler = self._handlers.get(kind)
            if handler is not None:
                response: Response = await handler(request, error)
                return response
        raise error
