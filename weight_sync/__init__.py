"""Weight versions of cosmos-launch: published by the trainer, proven by the rollout replicas, collected when unused.

    published = publish(DirectoryStore(root), version=7, timeline=0, tensors=hub_tensors(model))
    …the controller hands out a Publication…
    weights = HostCopy(directory, store).advance(publication)
    weights.changes_since(content_hash)      for engines that change in place, each by `open_delta`
    with weights.reading(): …                the whole

stores       where versions lie                     layout, manifest  what the bytes are, what is hashed
publishing   the trainer's half, with `chain`       delta             what a delta holds, and applying it
host         the one copy of a host                 download_plan     which forms are read
transport    from host to host, past the store      hf_names, lora    the names of the hub checkpoint
                                                    stored            any part of a tensor in a file
"""

from weight_sync.delta.delta import open_delta
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.hf_names import HubNames, gather_full, hub_tensors
from weight_sync.host.files import open_copy
from weight_sync.host.host_copy import HostCopy
from weight_sync.publishing.gc import collect, remove
from weight_sync.publishing.writer import PublishedVersion, publish
from weight_sync.stores import DirectoryStore, Store, open_store

__all__ = [
    "DirectoryStore",
    "HostCopy",
    "HubNames",
    "NotReadableError",
    "PublishedVersion",
    "Store",
    "WeightError",
    "collect",
    "gather_full",
    "hub_tensors",
    "open_copy",
    "open_delta",
    "open_store",
    "publish",
    "remove",
]
