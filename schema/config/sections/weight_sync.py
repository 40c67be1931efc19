"""`[weight_sync]`: how weight versions travel from policy to rollout."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Natural, Seconds, Section
from schema.config.key import key

MAX_ANCHOR_INTERVAL = 200
"""Below the links that a chain may have (`weight_sync.publishing.chain.LONGEST`): there is room for anchors that are
late."""


# fmt: off
class WeightSyncConfig(Section):
    """`[weight_sync]`: how weight versions travel."""

    transport: Literal["store", "collective"] = key("store",
        "How weights travel: `store`, through a directory or bucket that all replicas reach; `collective`, from the "
        "trainer to each host directly, and through the store where that fails.",
        acts="request or reply: Whether publications say where the trainer sends them from.")
    encoding: Literal["full", "delta"] = key("delta",
        "What a publication holds: `full`, all weights; `delta`, what changed against the one before, bit for bit.",
        acts="file: Whether publications hold all weights or what changed.")
    anchor_interval: int = key(20,
        "With `delta`: every so many publications there is a full version too, with which a replica that joins "
        "begins.", ge=1, le=MAX_ANCHOR_INTERVAL, acts="file: Which publications have a full version.")
    store: str = key("",
        "Where publications lie: a directory, relative to the current one, or `s3://bucket/prefix`. Empty: `weights` "
        "in the run's output directory.", acts="file: Where weight versions are written.", example="/shared/weights")
    store_timeout: Seconds = key(1800.0,
        "Seconds that a store which fails is tried again, by who writes and who reads, before this is an error of "
        "the replica.", acts="request or reply: How long a store that fails is tried again.")
    keep: int = key(4,
        "Publications kept beyond those that a replica uses or fetches; older ones are removed, unless one of these "
        "is a delta that builds on them.", ge=1, le=1_000_000, acts="file: Which weight versions stay.")
    host_cache: str = key("",
        "Directory of the one copy of the weights that all rollout replicas of a host share, an absolute path that "
        "exists on each host. Empty: in `/dev/shm` where it fits, else in the temporary directory.",
        acts="file: Where a host keeps the weights that its replicas load.", example="/scratch/weights")
    update_mode: Literal["recompute", "keep_kv"] = key("recompute",
        "At an update of running requests: `recompute` their cache under the new weights, or `keep_kv`: go on with "
        "the cache; a token's version is then the oldest in it.",
        acts="engine argument: What becomes of the cache of running requests.")
    checksum_interval: Natural = key(20,
        "Every so many versions each engine computes the hash of the weights that it serves, and it is compared with "
        "the trainer's. 0: only of the first version.",
        acts="request or reply: Which reports of a replica carry a hash.")
    collective_timeout: Seconds = key(30.0,
        "With `collective`: seconds in which the trainer must have sent a version to a host; what is missing then is "
        "fetched from the store.", acts="request or reply: When a version comes from the store after all.")
    lora: Literal["merged", "adapter"] = key("merged",
        "Of a model trained by low-rank adapters: publish weights with the adapters `merged` in, or the `adapter` "
        "alone, next to the model as the engine has loaded it: a small part of the bytes, and slower steps of "
        "generation.", acts="file: Which tensors a weight version consists of.")
