"""`/v1/config`: the config that runs (redacted), its JSON schema, and validation of another one."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.responses import Response

from controller.auth import USER
from controller.problems import ProblemError
from controller.redact import redacted
from controller.routes.base import OBJECT, answers, reply
from controller.service import Controller
from schema.config import Config
from schema.config.problem import ConfigError
from schema.config.reading.load import check_config
from schema.wire.messages import ErrorCode


class ConfigProblem(BaseModel):
    """One fault of a config."""

    model_config = ConfigDict(frozen=True)

    key: str
    message: str
    hint: str = ""


class ConfigVerdict(BaseModel):
    """Whether a config could run, and everything that is wrong with it."""

    model_config = ConfigDict(frozen=True)

    valid: bool
    problems: list[ConfigProblem]


CONFIG_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": OBJECT}}}
}


def router(controller: Controller) -> APIRouter:
    api = APIRouter(prefix="/v1/config", tags=["config"])
    tokens = controller.tokens

    @api.get("", responses=answers("application/json", "The configuration, secrets left out.", OBJECT))
    async def config(request: Request) -> Response:
        tokens.require(request, USER)
        text = json.dumps(redacted(controller.job.config.to_dict()))
        return Response(text, media_type="application/json")

    @api.get("/schema", responses=answers("application/json", "The JSON schema of a configuration.", OBJECT))
    async def schema(request: Request) -> Response:
        tokens.require(request, USER)
        return Response(json.dumps(Config.model_json_schema()), media_type="application/json")

    @api.post("/validate", responses={200: {"model": ConfigVerdict}}, openapi_extra=CONFIG_BODY)
    async def validate(request: Request) -> Response:
        tokens.require(request, USER)
        return reply(_verdict(await request.body()))

    return api


def _verdict(body: bytes) -> ConfigVerdict:
    try:
        data = from_json(body, allow_inf_nan=False)  # at most 200 levels deep
    except ValueError as error:
        raise ProblemError(ErrorCode.BAD_REQUEST, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProblemError(ErrorCode.BAD_REQUEST, "the body must be a JSON object: sections of the config")
    try:
        check_config(data)
    except ConfigError as error:
        found = [ConfigProblem(key=p.key, message=p.message, hint=p.hint) for p in error.problems]
        return ConfigVerdict(valid=False, problems=found)
    return ConfigVerdict(valid=True, problems=[])
