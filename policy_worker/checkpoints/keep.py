"""Which checkpoints stay: the newest, the best validated one, those that are being uploaded, then the newest others.

`max_keep` counts all that stay, but neither the newest nor the best nor one under upload is ever deleted for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from policy_worker.checkpoints.find import is_ancestor
from policy_worker.checkpoints.layout import Found

Scored = tuple[Found, float]
"""A checkpoint and the mean validation score of its weights."""


def scored(complete: Sequence[Found], newest: Found, scores: Mapping[int, float]) -> list[Scored]:
    """The checkpoints that were validated. scores: by weight version, of the way that led to the newest one."""
    way = [found for found in complete if is_ancestor(found.manifest, newest.manifest)]
    return [(found, scores[found.step]) for found in way if found.step in scores]


def best(candidates: Sequence[Scored]) -> Scored | None:
    """The one with the highest score; the newer of equals."""
    return max(candidates, key=lambda one: (one[1], one[0].manifest.timeline, one[0].step), default=None)


def superfluous(
    complete: Sequence[Found], newest: Found, favourite: Found | None, held: Collection[Found], max_keep: int
) -> list[Found]:
    """What to delete.

    Args:
        complete: all complete checkpoints. newest: the one that `latest` names. favourite: the best validated one.
        held: those that somebody reads right now. max_keep: how many stay; -1: all.
    """
    if max_keep < 0:
        return []
    sacred = [found for found in complete if found in (newest, favourite) or found in held]
    others = [found for found in complete if found not in sacred]
    others.sort(key=lambda found: order(found, newest), reverse=True)
    return others[max(max_keep - len(sacred), 0) :]


def order(found: Found, newest: Found) -> tuple[bool, int, int]:
    """Those that led to the newest before those of timelines that were left; then by age."""
    return is_ancestor(found.manifest, newest.manifest), found.manifest.timeline, found.step
