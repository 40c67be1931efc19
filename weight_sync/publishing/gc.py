"""Garbage collection: versions that are no longer needed are removed.

Who still needs a version is the controller's knowledge; this only does what it is asked, and touches nothing that it
did not write. A reader that opened a version before it went keeps it (files stay while they are mapped); on
network file systems that do not promise this, keep what any replica may be reading.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from weight_sync.stores import Store, owner_of, split_key

log = logging.getLogger(__name__)

ABANDONED_AFTER = 3600.0
"""Seconds after which an unfinished version counts as left behind by a dead writer."""


def collect(store: Store, keep: Collection[str], *, name: str = "", min_age: float = 0.0) -> list[str]:
    """Remove all versions published under `name` except those to keep.

    keep: URIs of publications (`Publication.uri`) that stay. name: as given to `publish`: versions of other jobs in
    the same store are not touched. min_age: versions younger than this many seconds stay too (their publication may
    be under way), and so do unfinished ones of that name.

    Returns:
        The names of the versions removed.

    Raises `WeightError`: an entry of `keep` is not a URI of a store; nothing was removed."""
    kept = {split_key(uri)[0] for uri in keep}
    removed: list[str] = []
    for version in store.versions():
        if version in kept or owner_of(version) != name or store.age(version) < min_age:
            continue
        if store.delete(version):
            removed.append(version)
    if name:
        store.sweep(min_age, f"{name}.")
    store.sweep(ABANDONED_AFTER)
    if removed:
        log.info("removed %d weight versions that are not needed any more: %s", len(removed), ", ".join(removed))
    return removed


def remove(store: Store, uris: Collection[str]) -> list[str]:
    """Remove exactly the versions of these publications; those already gone are passed over."""
    versions = [split_key(uri)[0] for uri in uris]
    return [version for version in versions if owner_of(version) is not None and store.delete(version)]
