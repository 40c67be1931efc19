"""Deltas that lead from the weights that are served to those that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollout_worker.engines.scatter import UnmappedError
from schema.wire.weights import Piece
from weight_sync.delta.delta import Delta, open_delta


def open_chain(pieces: Sequence[tuple[Path, Piece]], base: str, content_hash: str) -> list[Delta]:
    """Open and prove deltas, oldest first, and that they follow each other.

    Args:
        pieces: each with the root of the local store in which it lies. base: content hash of the weights that are
        served. content_hash: of those that are wanted.

    Raises:
        UnmappedError: one does not apply to what the one before leads to.
        WeightError: one is missing or damaged.
    """
    deltas, content = [], base
    for root, piece in pieces:
        delta = open_delta(root, piece)
        if delta.base != content:
            raise UnmappedError(f"{piece.uri} changes the weights {delta.base}, not {content}")
        content = delta.content_hash
        deltas.append(delta)
    if content != content_hash:
        raise UnmappedError(f"the changes lead to the weights {content}, not to {content_hash}")
    return deltas
