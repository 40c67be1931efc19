"""The OpenAPI document of the API as it is: real bodies, real answers, problems for whatever is refused.

Routes parse their bodies themselves (once, and only after the token is checked), so what FastAPI would write about
errors is not what happens. `document` puts that right: every call may be answered by a problem, every call but
health wants a bearer token, and the models of bodies stand among the components with all others.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from controller.api.auth_middleware import OPEN
from schema.wire.messages import Problem

REFERENCE = "#/components/schemas/{model}"
_PROBLEM = {
    "description": "Refused or failed; `code` says which, `detail` what to do.",
    "content": {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}},
}
_GENERATED = ("HTTPValidationError", "ValidationError")
"""Schemas of an answer that is never given."""


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a body; what it refers to travels under `$defs` until `document` moves it."""
    return kind.model_json_schema(ref_template=REFERENCE)


def document(app: FastAPI) -> dict[str, Any]:
    """The document of all routes of `app`."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for path, item in found["paths"].items():
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
    return found
