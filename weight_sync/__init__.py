"""Weight versions: published by the trainer, proven by the rollout replicas, collected when unused.

    published = publish(DirectoryStore(root), version=7, timeline=0, tensors=hub_tensors(model))
    …the controller hands out a Publication…
    for name, tensor in fetch(root, publication).tensors(): …

`stores` says where versions lie, `layout` what the bytes are and what is hashed, `publish`, `fetch` and
`collect` are the three things one does with a version, `hub` gives a model's weights the names of its hub
checkpoint.
"""

from weight_sync.collect import collect, remove
from weight_sync.errors import NotReadableError, WeightError
from weight_sync.fetch import Weights, fetch
from weight_sync.hub import HubNames, gather_full, hub_tensors
from weight_sync.publish import Published, publish
from weight_sync.stores import DirectoryStore, Store, open_store

__all__ = [
    "DirectoryStore",
    "HubNames",
    "NotReadableError",
    "Published",
    "Store",
    "WeightError",
    "Weights",
    "collect",
    "fetch",
    "gather_full",
    "hub_tensors",
    "open_store",
    "publish",
    "remove",
]
