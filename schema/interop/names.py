"""The tables of the readers, read the other way: what other systems call a key of ours.

names_elsewhere()["rollout.n_generation"] ─▶ {"verl": ("actor_rollout_ref.rollout.n",), "ROLL": (…)}
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from schema.interop.registry import readers


@cache
def names_elsewhere() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Our key -> system -> its keys that are turned into ours, in the order of its tables; our own name left out.

    A key that decides about several of ours stands with each of them. Older spellings are left out.
    """
    found: dict[str, dict[str, dict[str, None]]] = {}
    for reader in readers():
        for kind in reader.kinds:
            for row in reader.rows(kind):
                for ours in row.how.ours:
                    if row.key.removesuffix(".*") != ours:
                        found.setdefault(ours, {}).setdefault(reader.title, {})[row.key] = None
    return {
        ours: {system: tuple(keys) for system, keys in systems.items()} for ours, systems in found.items()
    }
