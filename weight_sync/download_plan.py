"""Planning: the fewest bytes that lead to a version. Pure.

    chain      A ──delta──▶ B ──delta──▶ C ──delta──▶ D        full forms of A and C
    held B     B+C+D's deltas or C's full form and D's delta, whichever is less
    nothing    A's full form and three deltas, or C's and one

A way starts at what is held, for nothing, or at any full form; from there on it takes one delta for each link.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from schema.wire.weights import ChainLink, Piece, WeightManifest
from weight_sync.errors import WeightError


@dataclass(frozen=True, slots=True)
class DownloadStep:
    """Fetch this piece: a full form replaces everything, a delta turns the version before into this one."""

    kind: Literal["full", "delta"]
    piece: Piece
    content_hash: str
    """Hash of the weights after this step."""


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """Steps in order; none of them where the version is held already."""

    steps: tuple[DownloadStep, ...]

    @property
    def n_bytes(self) -> int:
        return sum(step.piece.n_bytes for step in self.steps)


def links_of(manifest: WeightManifest, piece: Piece) -> list[ChainLink]:
    """The chain of a manifest with the manifest itself as its last link.

    piece: the manifest's own. Raises `WeightError` when the chain does not end at the base of a delta."""
    earlier = list(manifest.chain)
    if manifest.kind == "full":
        own = ChainLink(version=manifest.version, content_hash=manifest.content_hash, full=piece)
        return [*earlier, own]
    if not earlier or earlier[-1].content_hash != manifest.base:
        end = earlier[-1].content_hash if earlier else "nothing"
        raise WeightError(f"{piece.uri} is a delta against {manifest.base}, its chain ends at {end}")
    return [*earlier, ChainLink(version=manifest.version, content_hash=manifest.content_hash, delta=piece)]


def cheapest(links: Sequence[ChainLink], held: str | None, broken: Collection[str] = ()) -> DownloadPlan | None:
    """The way to the last link that takes the fewest bytes; of equal ones that with the fewest steps.

    links: oldest first; the first one's delta leads from nowhere and is not used. held: content hash of the weights
    at hand, if any. broken: URIs of manifests that cannot be used.

    Returns:
        The way, or None when there is none."""
    best: DownloadPlan | None = None
    for index, link in enumerate(links):
        ways: list[DownloadPlan] = []
        if held == link.content_hash:
            ways.append(DownloadPlan(()))
        if best is not None and index and link.delta is not None and link.delta.uri not in broken:
            ways.append(DownloadPlan((*best.steps, DownloadStep("delta", link.delta, link.content_hash))))
        if link.full is not None and link.full.uri not in broken:
            ways.append(DownloadPlan((DownloadStep("full", link.full, link.content_hash),)))
        best = min(ways, key=lambda way: (way.n_bytes, len(way.steps)), default=None)
    return best


def deltas_between(links: Sequence[ChainLink], base: str) -> list[Piece] | None:
    """The deltas that lead from the weights with the content hash `base` to the last link; None when a link has
    none, or `base` is not in the chain. Empty when it is the last link."""
    pieces: list[Piece] = []
    for link in reversed(links):
        if link.content_hash == base:
            return pieces[::-1]
        if link.delta is None:
            return None
        pieces.append(link.delta)
    return None
