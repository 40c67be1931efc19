"""`/v1/proof`: open to all, answered by a controller that stands by as well."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from controller.api.auth import PROVER
from controller.api.openapi import models
from controller.api.routes.base import new_router, reply
from controller.errors import ApiError
from controller.services.controller import Controller
from controller.services.proof import ProofService
from schema.wire.invalid import describe
from schema.wire.messages import ErrorCode
from schema.wire.messages.proof import PATH, ProofReply, ProofRequest

NOT_KEPT = {"cache-control": "no-store"}


def router(_: Controller) -> APIRouter:
    api = new_router("proof")

    @api.get(PATH, **models(ProofReply))
    async def proof(request: Request, asked: Annotated[ProofRequest, Query()]) -> Response:
        """Prove that this controller has the tokens of its job: a client sends its own only then."""
        return answer(request, asked)

    return api


def answer(request: Request, asked: ProofRequest | None = None) -> Response:
    """The proof. Reads the question itself where no framework has. Raises `ApiError` (422)."""
    if asked is None:
        try:
            asked = ProofRequest.model_validate(dict(request.query_params))
        except ValidationError as error:
            detail = describe(error.errors(include_url=False))
            raise ApiError(ErrorCode.BAD_REQUEST, detail) from None
    service: ProofService = request.scope[PROVER]
    host, port = request.scope.get("server") or ("", 0)
    answered = reply(service.prove(asked, host, port or 0))
    answered.headers.update(NOT_KEPT)
    return answered
