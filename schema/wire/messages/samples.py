"""Samples that rollout replicas push: the entries of a bundle, and what came of each."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from schema.wire.messages.base import Count, ErrorCode, Message, Text


class PushItem(Message):
    """One entry of a bundle of samples (metadata key "pushes"), same order as the frames."""

    group_id: Text
    lease_id: Text
    index: Count


class PushList(Message):
    replica_id: Text
    pushes: Annotated[list[PushItem], FailFast()] = Field(min_length=1, max_length=4096)


class PushResult(Message):
    group_id: str
    index: int
    accepted: bool = Field(description="Also true for a repeated push of what is stored already.")
    duplicate: bool = False
    code: ErrorCode | None = None
    detail: str = ""


class PushReply(Message):
    results: list[PushResult]
