"""The chain of versions that a trainer has published: which form is next, and what the next manifest names.

    full ◀─ delta ◀─ delta ◀─ delta ◀─ …      ids rise by one publication each
                       └ full                   an anchor: the same version once more, written after it was announced

Invariant: every link but the first has a delta that applies to the link before, the first has a full form, and all
files of all links are there. So a process that holds any of these versions, or none, has a way to the next one.

A full version is due
    - at the first publication of a process: no other process's files are built upon;
    - every `interval` publications, as an anchor next to the delta;
    - when a replica could not read what there is: as an anchor next to the delta at once, and if that fails as the
      next publication;
    - instead of a delta that would be hardly smaller. After d of these in a row, 2^d − 1 more (15 at most) are full
      without trying: comparing costs as much as writing.

Pure bookkeeping of one process, safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

from schema.wire.messages.recovery import MAX_PUBLICATIONS
from schema.wire.weights import MAX_CHAIN, ChainLink, Piece
from weight_sync.publishing.writer import PublishedVersion

LONGEST = min(MAX_CHAIN, MAX_PUBLICATIONS - 1)
"""Links of a chain: a manifest lists them, and a trainer can declare as many publications after a loss of history."""
MOST_UNTRIED = 15


@dataclass(frozen=True, slots=True)
class _Entry:
    publication: int
    link: ChainLink


class Chain:
    """See the module's docstring.

    interval: publications from one full form to the next (`weight_sync.anchor_interval`)."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._entries: list[_Entry] = []
        self._asked = False
        self._failed = False
        self._dense = 0
        self._untried = 0
        self._lock = threading.Lock()

    # ---- what is next -------------------------------------------------------------------------------------

    @property
    def next_is_full(self) -> bool:
        """Whether the next publication is full without a look at what changed."""
        with self._lock:
            no_base = self._begins() is None or self._since_full() >= LONGEST
            return no_base or (self._asked and self._failed) or self._untried > 0

    @property
    def anchor_due(self) -> bool:
        """Whether the newest publication, a delta, should get a full form as well, now that it is announced."""
        with self._lock:
            if not self._entries or self._entries[-1].link.full is not None:
                return False
            return self._asked or self._since_full() >= self._interval

    @property
    def waits_for_anchor(self) -> bool:
        """Whether the next publication should name an anchor that is still being written: a replica needs it."""
        with self._lock:
            return self._asked and not self._failed

    def named(self) -> tuple[list[ChainLink], int | None]:
        """The chain of the next manifest, oldest first, whose last link is what a delta applies to; and its
        `Publication.begins`: the newest publication with a full form."""
        with self._lock:
            return [entry.link for entry in self._entries], self._begins()

    # ---- what happened ------------------------------------------------------------------------------------

    def published(self, publication: int, version: int, published: PublishedVersion) -> None:
        """A publication was announced under this id."""
        full = published.kind == "full"
        with self._lock:
            if full:
                self._asked = self._failed = False
                self._untried = max(0, self._untried - 1)
                self._entries.clear()  # nothing leads from them to here
            else:
                self._dense = 0
            link = ChainLink(
                version=version,
                content_hash=published.content_hash,
                delta=None if full else published.piece,
                full=published.piece if full else None,
            )
            self._entries.append(_Entry(publication, link))
            self._trim(len(self._entries) - LONGEST)

    def dense(self) -> None:
        """A delta was given up since it would have been hardly smaller than the full version that follows."""
        with self._lock:
            self._dense += 1
            # This publication itself counts as the first one that is full.
            self._untried = min(2**self._dense - 1, MOST_UNTRIED) + 1

    def asked(self) -> None:
        """A replica cannot read what there was before the newest publication."""
        with self._lock:
            if self._entries and self._entries[-1].link.full is None:
                self._asked, self._failed = True, False

    def anchored(self, publication: int, piece: Piece) -> None:
        """A full form of this publication lies in the store."""
        with self._lock:
            for i, entry in enumerate(self._entries):
                if entry.publication == publication:
                    link = entry.link.model_copy(update={"full": piece})
                    self._entries[i] = _Entry(publication, link)
                    self._asked = self._failed = False

    def anchor_failed(self) -> None:
        """An anchor could not be written; it is due again with the next publication."""
        with self._lock:
            self._failed = True

    def collected(self, publications: Collection[int]) -> None:
        """Files of these publications are removed: their links leave, and those that come before them."""
        with self._lock:
            gone = [i for i, entry in enumerate(self._entries) if entry.publication in publications]
            self._trim(gone[-1] + 1 if gone else 0)

    # ---- inside -------------------------------------------------------------------------------------------

    def _trim(self, n: int) -> None:
        """Take the `n` oldest links out, and then as many as come before the next full form."""
        if n > 0:
            rest = self._entries[n:]
            first = next((i for i, entry in enumerate(rest) if entry.link.full is not None), len(rest))
            self._entries = rest[first:]

    def _begins(self) -> int | None:
        full = [entry.publication for entry in self._entries if entry.link.full is not None]
        return full[-1] if full else None

    def _since_full(self) -> int:
        """Publications after the newest full form."""
        full = [i for i, entry in enumerate(self._entries) if entry.link.full is not None]
        return len(self._entries) - 1 - full[-1] if full else len(self._entries)
