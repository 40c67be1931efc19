"""Errors as `application/problem+json` with stable codes (RFC 9457), whatever raised them."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from controller.errors import ApiError
from controller.store import StoreUnavailable
from schema.wire.frame import FrameError
from schema.wire.invalid import describe
from schema.wire.messages import ErrorCode, Problem

log = logging.getLogger(__name__)

HUNG_UP = 499
"""No caller reads this answer; web servers' logs know the number."""

STATUS: dict[ErrorCode, int] = {
    ErrorCode.BAD_REQUEST: 422,
    ErrorCode.BAD_FRAME: 422,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_YOURS: 403,
    ErrorCode.NAME_TAKEN: 409,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.LEASE_LOST: 409,
    ErrorCode.FUTURE_VERSION: 409,
    ErrorCode.STALE_INCARNATION: 409,
    ErrorCode.UNKNOWN_REPLICA: 404,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.WRONG_STEP: 409,
    ErrorCode.CONFLICT: 409,
    ErrorCode.JOB_FAILED: 409,
    ErrorCode.JOB_FINISHED: 409,
    ErrorCode.STORE_UNAVAILABLE: 503,
    ErrorCode.STANDBY: 503,
    ErrorCode.BUSY: 503,
    ErrorCode.TOO_SLOW: 408,
    ErrorCode.INTERNAL: 500,
}

TITLES: dict[int, str] = {
    400: "Bad request",
    401: "No valid token",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict with the state of the job",
    413: "Request too large",
    422: "Invalid request",
    431: "Request head too large",
    500: "Internal error",
    503: "Not available now",
}


HEADERS: dict[ErrorCode, dict[str, str]] = {
    ErrorCode.UNAUTHORIZED: {"www-authenticate": "Bearer"},
    ErrorCode.TOO_SLOW: {"connection": "close"},
}


def problem(
    code: ErrorCode, detail: str, *, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """The answer for one problem."""
    number = status or STATUS[code]
    body = Problem(title=TITLES.get(number, "Error"), status=number, code=code, detail=detail)
    return Response(body.model_dump_json(), number, headers=headers, media_type="application/problem+json")


def refusal(error: ApiError) -> Response:
    """The answer for a refused call."""
    after = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    return problem(error.code, error.detail, headers=HEADERS.get(error.code, {}) | after)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem document."""

    @app.exception_handler(ApiError)
    async def _refused(_: Request, error: ApiError) -> Response:
        return refusal(error)

    @app.exception_handler(FrameError)
    async def _frame(_: Request, error: FrameError) -> Response:
        return problem(ErrorCode.BAD_FRAME, str(error))

    @app.exception_handler(StoreUnavailable)
    async def _store(_: Request, error: StoreUnavailable) -> Response:
        headers = {"retry-after": str(max(1, round(error.retry_after)))}
        return problem(ErrorCode.STORE_UNAVAILABLE, str(error), headers=headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        return problem(ErrorCode.BAD_REQUEST, describe(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        code = ErrorCode.NOT_FOUND if error.status_code == 404 else ErrorCode.BAD_REQUEST
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return problem(code, detail, status=error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def _hung_up(request: Request, _: ClientDisconnect) -> Response:
        log.debug("%s %s: the caller hung up in the middle of its request", request.method, request.url.path)
        return Response(status_code=HUNG_UP)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        detail = f"{type(error).__name__}; the controller's log has the traceback"
        return problem(ErrorCode.INTERNAL, detail)
