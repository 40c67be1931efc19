"""`[weight_sync]`: how weight versions travel from policy to rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import Section


class WeightSyncConfig(Section):
    """`[weight_sync]`: how weight versions travel."""

    transport: Literal["store", "collective"] = Field(
        default="store",
        description="How weights travel: `store`, through a directory that all replicas see; `collective`, from "
        "GPU to GPU.",
    )
    encoding: Literal["full", "delta"] = Field(
        default="full",
        description="What a publication holds: `full`, all weights; `delta`, what changed, bit for bit.",
    )
    anchor_interval: int = Field(
        default=20,
        ge=1,
        description="With `delta`: every so many publications are full, for replicas that join.",
    )
    store: str = Field(
        default="",
        description="Directory of the store, relative to the current directory. Empty: `weights` in the "
        "run's output directory.",
    )
    keep: int = Field(
        default=4,
        ge=1,
        description="Publications kept beyond those that a replica still uses; older ones are removed.",
    )
    update_mode: Literal["recompute", "keep_kv"] = Field(
        default="recompute",
        description="At an update of running requests: `recompute` their cache under the new weights, or "
        "`keep_kv`.",
    )
