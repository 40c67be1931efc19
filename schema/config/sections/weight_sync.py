"""`[weight_sync]`: how weight versions travel from policy to rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import MAX_TIMEOUT, Section

MAX_ANCHOR_INTERVAL = 200
"""Below the links that a chain may have (`weight_sync.publishing.chain.LONGEST`): there is room for anchors that are
late."""


class WeightSyncConfig(Section):
    """`[weight_sync]`: how weight versions travel."""

    transport: Literal["store", "collective"] = Field(
        default="store",
        description="How weights travel: `store`, through a directory or bucket that all replicas reach; "
        "`collective`, from the trainer to each host directly, and through the store where that fails.",
    )
    encoding: Literal["full", "delta"] = Field(
        default="delta",
        description="What a publication holds: `full`, all weights; `delta`, what changed against the one before, "
        "bit for bit.",
    )
    anchor_interval: int = Field(
        default=20,
        ge=1,
        le=MAX_ANCHOR_INTERVAL,
        description="With `delta`: every so many publications there is a full version too, with which a replica "
        "that joins begins.",
    )
    store: str = Field(
        default="",
        description="Where publications lie: a directory, relative to the current one, or `s3://bucket/prefix`. "
        "Empty: `weights` in the run's output directory.",
    )
    store_timeout: float = Field(
        default=1800.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="Seconds that a store which fails is tried again, by who writes and who reads, before this is "
        "an error of the replica.",
    )
    keep: int = Field(
        default=4,
        ge=1,
        le=1_000_000,
        description="Publications kept beyond those that a replica uses or fetches; older ones are removed, unless "
        "one of these is a delta that builds on them.",
    )
    host_cache: str = Field(
        default="",
        description="Directory of the one copy of the weights that all rollout replicas of a host share, an absolute "
        "path that exists on each host. Empty: in `/dev/shm` where it fits, else in the temporary directory.",
    )
    update_mode: Literal["recompute", "keep_kv"] = Field(
        default="recompute",
        description="At an update of running requests: `recompute` their cache under the new weights, or "
        "`keep_kv`: go on with the cache; a token's version is then the oldest in it.",
    )
    checksum_interval: int = Field(
        default=20,
        ge=0,
        description="Every so many versions each engine computes the hash of the weights that it serves, and it is "
        "compared with the trainer's. 0: only of the first version.",
    )
    collective_timeout: float = Field(
        default=30.0,
        gt=0,
        le=MAX_TIMEOUT,
        description="With `collective`: seconds in which the trainer must have sent a version to a host; what is "
        "missing then is fetched from the store.",
    )
    lora: Literal["merged", "adapter"] = Field(
        default="merged",
        description="Of a model trained by low-rank adapters: publish weights with the adapters `merged` in, or the "
        "`adapter` alone.",
    )
