"""The OpenAPI document of the API as it is: real bodies, real answers, problems for whatever is refused.

Routes parse their bodies themselves (once, and only after the token is checked), so what FastAPI would write about
errors is not what happens. `document` puts that right: every call may be answered by a problem, every call but
health needs a bearer token, and the models of bodies stand among the components with all others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from controller.api.auth import OPEN
from schema.wire.frame import CONTENT_TYPE
from schema.wire.messages import Problem

REFERENCE = "#/components/schemas/{model}"
OBJECT = {"type": "object"}
OBJECTS = {"type": "array", "items": OBJECT}
_PROBLEM = {
    "description": "Refused or failed; `code` says which, `detail` what to do.",
    "content": {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}},
}
_GENERATED = ("HTTPValidationError", "ValidationError")
"""Schemas of an answer that is never given."""


@cache
def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a body; what it refers to travels under `$defs` until `document` moves it."""
    return kind.model_json_schema(ref_template=REFERENCE)


def models(answer: Any, body: type[BaseModel] | None = None, **route_options: Any) -> dict[str, Any]:
    """Arguments of a route that answers with a model, and parses one from its body itself."""
    described = {"responses": {200: {"model": answer}, **route_options.pop("responses", {})}, **route_options}
    return described if body is None else described | takes(body)


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Arguments of a route that parses a model from its body itself."""
    return _takes("application/json", schema_of(body))


def takes_frame(description: str) -> dict[str, Any]:
    """Arguments of a route whose body is the bytes of a frame."""
    return _takes(CONTENT_TYPE, {"type": "string", "format": "binary", "description": description})


def _takes(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"openapi_extra": {"requestBody": {"required": True, "content": {content_type: {"schema": dict(schema)}}}}}


def answers(content_type: str, description: str, schema: dict[str, Any] | None = None) -> dict[int | str, Any]:
    """The description of an answer that is not a model."""
    return {200: {"description": description, "content": {content_type: {"schema": schema or {"type": "string"}}}}}


FRAME_ANSWER = answers(CONTENT_TYPE, "Frame bytes.", {"type": "string", "format": "binary"})


def document(app: FastAPI) -> dict[str, Any]:
    """The document of all routes of `app`."""
    openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = openapi_schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, item in openapi_schema["paths"].items():
        for operation in item.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _PROBLEM
            if path not in OPEN:
                operation["security"] = [{"token": []}]
            for media in operation.get("requestBody", {}).get("content", {}).values():
                schemas |= media["schema"].pop("$defs", {})
    for name in _GENERATED:
        schemas.pop(name, None)
    schemas["Problem"] = Problem.model_json_schema(ref_template=REFERENCE)
    schemas |= schemas["Problem"].pop("$defs", {})
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return openapi_schema
