"""Samples in and out: single pushes, bundles, and one sample's frame for people. Tensors are never decoded."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from controller.api.auth import ROLLOUT, USER, require, require_own
from controller.api.openapi import FRAME_ANSWER, models, takes_frame
from controller.api.routes.base import Identifier, Number, frame_reply, new_router, reply, reply_list
from controller.errors import ApiError
from controller.services.controller import Controller
from controller.services.samples import Push
from schema.wire import messages as m
from schema.wire.frame import FrameError, bundle_ranges
from schema.wire.invalid import describe
from schema.wire.sample_file import Order

MOST_FOUND = 1000
BUNDLE = 'a bundle of samples, with a PushList as JSON in the metadata under "pushes"'


def router(controller: Controller) -> APIRouter:
    api = new_router("samples", "/v1")
    service, registry = controller.samples, controller.job.registry

    @api.post(
        "/groups/{group_id}/samples/{index}", **models(m.PushReply, **takes_frame("one sample (schema.wire.sample)"))
    )
    async def push(request: Request, group_id: Identifier, index: Number) -> Response:
        require(request, ROLLOUT)
        item = _item(group_id, request.headers.get("x-lease-id", ""), index)
        replica_id = request.headers.get("x-replica-id", "")
        if not replica_id or not item.lease_id:
            detail = "the headers x-replica-id and x-lease-id say whose sample this is, and one is missing"
            raise ApiError(m.ErrorCode.BAD_REQUEST, detail)
        body = await request.body()
        require_own(request, registry, replica_id)
        return reply(await service.push(replica_id, body, [Push(item, body)]))

    @api.post("/samples", **models(m.PushReply, **takes_frame(BUNDLE)))
    async def push_many(request: Request) -> Response:
        require(request, ROLLOUT)
        body = await request.body()
        replica_id, pushes = _unpack(body)
        require_own(request, registry, replica_id)
        return reply(await service.push(replica_id, body, pushes))

    @api.get("/samples", **models(list[m.SampleRecord]))
    async def find(
        request: Request,
        kind: m.GroupKind | None = None,
        step: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
        order: Order | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 20,
    ) -> Response:
        """Samples as text: of one step, or of the newest; the best, the worst or the failed ones of many.

        Without `step` these are looked for in the newest files alone.
        """
        require(request, USER)
        return reply_list(m.SampleRecord, await service.find(kind, step, order, limit))

    @api.get("/samples/{group_id}/{index}", responses=FRAME_ANSWER)
    async def sample(request: Request, group_id: Identifier, index: Number) -> Response:
        require(request, USER)
        return frame_reply(await service.sample(group_id, index))

    return api


def _item(group_id: str, lease_id: str, index: int) -> m.PushItem:
    try:
        return m.PushItem(group_id=group_id, lease_id=lease_id, index=index)
    except ValidationError as error:
        detail = describe(error.errors(include_url=False))
        raise ApiError(m.ErrorCode.BAD_REQUEST, detail) from None


def _unpack(body: bytes) -> tuple[str, list[Push]]:
    ranges, metadata = bundle_ranges(body)
    try:
        listed = m.PushList.model_validate_json(metadata["pushes"])
    except KeyError:
        raise FrameError('the bundle has no "pushes" in its metadata') from None
    except ValidationError as error:
        raise FrameError(f"pushes: {describe(error.errors(include_url=False))}") from None
    if len(listed.pushes) != len(ranges):
        raise FrameError(f"{len(listed.pushes)} pushes are listed, but the bundle has {len(ranges)} frames")
    view = memoryview(body)
    placed = zip(listed.pushes, ranges, strict=True)
    return listed.replica_id, [Push(item, view[start:end], start) for item, (start, end) in placed]
