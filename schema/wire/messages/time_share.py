"""Devices that trainer and rollout replicas share by time: who has them says so, and is told when that changes."""

from __future__ import annotations

import time

from pydantic import Field

from schema.wire.messages.base import Count, Message


class TurnRequest(Message):
    incarnation: Count
    holds: bool = Field(
        description="Rollout replica: whether it has memory on its devices. Trainer: whether it has or wants them."
    )
    sequence: int = Field(
        default_factory=lambda: time.monotonic_ns() // 1000,
        description="Rises from call to call; one that comes late, or twice, changes nothing any more.",
    )
    wait_s: float = Field(
        default=0.0, ge=0, le=60, description="Long-poll: how long an answer that changes nothing may wait."
    )


class TurnReply(Message):
    yours: bool = Field(
        description="Whether the caller may have memory on its devices: what holds any must release it where it may "
        "not, and say so."
    )
