"""`/v1/config`: the config that runs (redacted), its JSON schema, and validation of another one; the API's document.

A validation is bounded in size, time and answer, and runs in a thread: the loop goes on serving the job.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.responses import Response

from controller.api.auth import USER, require
from controller.api.openapi import OBJECT, answers, document, models
from controller.api.routes.base import new_router, reply
from controller.errors import ApiError
from controller.services.controller import Controller
from convert import hints
from schema.config import Config
from schema.config.loading.load import check_config
from schema.config.problem import ConfigError
from schema.config.secrets import cut, masked
from schema.wire.messages import ErrorCode

MAX_CONFIG_BYTES = 1024 * 1024
"""The most bytes of a config to validate: the largest ones have some ten thousand."""
MOST_PROBLEMS = 50
"""Faults in one answer: more would not be read."""
VALIDATE_SECONDS = 20.0
"""After which a validation is given up: a config takes milliseconds."""


class ConfigProblem(BaseModel):
    """One fault of a config."""

    model_config = ConfigDict(frozen=True)

    key: str
    message: str
    hint: str = ""


class ConfigVerdict(BaseModel):
    """Whether a config could run, and what is wrong with it: `more` faults are counted, but not shown."""

    model_config = ConfigDict(frozen=True)

    valid: bool
    problems: list[ConfigProblem]
    more: int = 0


CONFIG_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": OBJECT}}}}


def router(controller: Controller) -> APIRouter:
    hints.install()  # a key of another system's is answered with ours
    api, validation = new_router("config", "/v1"), _Validation()

    @api.get("/config", responses=answers("application/json", "The configuration, secrets left out.", OBJECT))
    async def config(request: Request) -> Response:
        require(request, USER)
        text = json.dumps(cut(masked(controller.job.config.to_dict())))
        return Response(text, media_type="application/json")

    @api.get("/config/schema", responses=answers("application/json", "The JSON schema of a configuration.", OBJECT))
    async def schema(request: Request) -> Response:
        require(request, USER)
        return Response(json.dumps(Config.model_json_schema()), media_type="application/json")

    @api.post("/config/validate", **models(ConfigVerdict), openapi_extra=CONFIG_BODY)
    async def validate(request: Request) -> Response:
        require(request, USER)
        return reply(await validation.verdict(await _small_body(request)))

    @api.get("/openapi.json", responses=answers("application/json", "This document.", OBJECT))
    async def described(request: Request) -> Response:
        require(request, USER)
        return Response(json.dumps(document(request.app)), media_type="application/json")

    return api


class _Validation:
    """Checks one config at a time, in a thread: nothing can stop it, so it keeps the next one out until its end."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def verdict(self, body: bytes) -> ConfigVerdict:
        """Return what is wrong with a config. Raises `ApiError` (422, 503)."""
        try:
            async with asyncio.timeout(VALIDATE_SECONDS):
                await self._free.acquire()
                work = asyncio.create_task(asyncio.to_thread(_verdict, body))
                work.add_done_callback(lambda _: self._free.release())
                return await asyncio.shield(work)
        except TimeoutError:
            detail = (
                f"the config could not be checked within {VALIDATE_SECONDS:g} s: it has too many keys, or "
                "others are being checked"
            )
            raise ApiError(ErrorCode.BUSY, detail, retry_after=1) from None


async def _small_body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_CONFIG_BYTES:
            detail = f"a config of more than {MAX_CONFIG_BYTES} bytes is not validated"
            raise ApiError(ErrorCode.TOO_LARGE, detail)
    return bytes(body)


def _verdict(body: bytes) -> ConfigVerdict:
    try:
        data = from_json(body, allow_inf_nan=False)  # at most 200 levels deep
    except ValueError as error:
        raise ApiError(ErrorCode.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(ErrorCode.BAD_REQUEST, "the body must be a JSON object: sections of the config")
    try:
        check_config(data)
    except ConfigError as error:
        shown = error.problems[:MOST_PROBLEMS]
        problems = [ConfigProblem(key=p.key, message=p.message, hint=p.hint) for p in shown]
        return ConfigVerdict(valid=False, problems=problems, more=error.count - len(shown))
    return ConfigVerdict(valid=True, problems=[])
