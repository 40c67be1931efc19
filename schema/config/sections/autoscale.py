"""`[autoscale]`: how many rollout replicas there are while the job runs. All times are seconds."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import MAX_TIMEOUT, MOST_RANKS, Section


class AutoscaleConfig(Section):
    """`[autoscale]`: rollout replicas that come and go with the need."""

    enable: bool = Field(
        default=False, description="Whether the number of rollout replicas follows the need."
    )
    min_replicas: int = Field(default=1, ge=0, le=MOST_RANKS, description="Fewest rollout replicas.")
    max_replicas: int = Field(default=8, ge=1, le=MOST_RANKS, description="Most rollout replicas.")
    interval: float = Field(
        default=30.0, gt=0.0, le=MAX_TIMEOUT, description="Seconds between two decisions."
    )
    target_wait: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Share of its time that the trainer may wait for samples before replicas are added.",
    )
    scale_down_delay: float = Field(
        default=300.0,
        ge=0.0,
        le=MAX_TIMEOUT,
        description="Seconds of too little work before a replica is drained.",
    )
