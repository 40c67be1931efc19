"""A trainer's record of its steps, so that a controller whose store lost history gets it back.

    steps     0 ····· first ───────── steps          first … steps − 1: remembered, with table and metrics
                │        └ replayed where the controller knows fewer steps
                └ covered by the newest checkpoint's snapshot

How far back? A commit that is answered is on disk, where the server reports it (`CommitReply.durable_steps`), and
what is on disk comes back: then nothing before it is ever asked for. But disks lie, and servers are configured not to
wait, so at least `REMEMBERED` steps are kept in any case, and `MOST` at most: a step costs a few bytes per sample.

Pure bookkeeping, safe to use from several threads.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schema.wire import messages as m
from schema.wire.batch import StepTable
from schema.wire.messages.recovery import MAX_PUBLICATIONS
from schema.wire.weights import Publication

REMEMBERED = 64
"""Steps that are kept even if their commits are on disk: for a disk that lied, more than a minute of most runs."""
MOST = 1024
"""Steps that are kept where no commit is known to be on disk."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One step that the weights contain. `packed`: its table, compressed; None in a supervised job."""

    step: int
    metrics: dict[str, float]
    at: float
    packed: bytes | None
    validations: tuple[m.HeldOutLoss, ...] = ()

    @property
    def table(self) -> StepTable | None:
        return None if self.packed is None else StepTable.model_validate_json(zlib.decompress(self.packed))


class RejoinLog:
    """See the module's docstring. `snapshot`: what the newest checkpoint holds of the ledger."""

    def __init__(self) -> None:
        self.snapshot: Callable[[], m.LedgerSnapshot | None] = lambda: None
        self.steps = 0
        self.registration = ""
        self.newest_publication = 0
        self._reply: m.RegisterReply | None = None
        self._acknowledged = 0
        self._table: StepTable | None = None
        self._trained: deque[Trained] = deque(maxlen=MOST)
        self._publications: deque[Publication] = deque(maxlen=MAX_PUBLICATIONS)
        self._lock = threading.Lock()

    # ---- what happens -------------------------------------------------------------------------------------

    def registered(self, request: m.RegisterRequest, reply: m.RegisterReply) -> None:
        """A registration begins a new history; the weights contain the steps that it was made with."""
        with self._lock:
            self._reply, self.registration = reply, request.request_id
            resumed = reply.committed_steps if request.resume_step is None else request.resume_step
            self.steps = self._acknowledged = resumed
            self.heard(0 if reply.publication is None else reply.publication.id)
            self._trained.clear()
            self._publications.clear()
            self._table = None

    def healed(self, step: int) -> None:
        """The weights were loaded from a checkpoint of so many committed steps."""
        with self._lock:
            self.steps = self._acknowledged = step
            self._trained.clear()

    def took(self, table: StepTable) -> None:
        """The batch of the next step is here."""
        with self._lock:
            self._table = table

    def applied(
        self, step: int, metrics: Mapping[str, float], at: float, validations: Iterable[m.HeldOutLoss] = ()
    ) -> str:
        """The weights contain this step now, whatever the controller will say; the digest of its batch."""
        with self._lock:
            table = self._table if self._table is not None and self._table.step == step else None
            packed = None if table is None else zlib.compress(table.model_dump_json().encode(), 1)
            self._trained.append(Trained(step, dict(metrics), at, packed, tuple(validations)))
            self.steps = step + 1
            return "" if table is None else table.digest

    def committed(self, reply: m.CommitReply) -> None:
        """A commit was answered."""
        with self._lock:
            self._acknowledged = max(self._acknowledged, reply.committed_steps)
            oldest = min(reply.durable_steps, self.steps - REMEMBERED)
            while self._trained and self._trained[0].step < oldest:
                self._trained.popleft()

    def published(self, reply: m.PublishReply) -> None:
        """A publication was answered; those whose files may go are not declared any more."""
        with self._lock:
            gone = set(reply.collectable)
            kept = [publication for publication in self._publications if publication.id not in gone]
            if all(publication.id != reply.publication.id for publication in kept):
                kept.append(reply.publication)
            self._publications = deque(kept, maxlen=MAX_PUBLICATIONS)
            self.heard(reply.publication.id)

    def heard(self, publication_id: int) -> None:
        """There is, or was, a publication with this id: it must not be used for another."""
        self.newest_publication = max(self.newest_publication, publication_id)

    # ---- what is known ------------------------------------------------------------------------------------

    @property
    def known(self) -> tuple[int, int]:
        """Committed steps and publication id that the controller has confirmed: it must never know less."""
        with self._lock:
            newest = self._publications[-1].id if self._publications else 0
            return self._acknowledged, newest

    def claim(self) -> dict[str, Any]:
        """The fields of a `DeclareRequest` that are history."""
        with self._lock:
            assert self._reply is not None
            return {
                "timeline": self._reply.timeline,
                "began": self._reply.timeline_began,
                "since": self._reply.timeline_since,
                "first": self._trained[0].step if self._trained else self.steps,
                "steps": self.steps,
                "publications": list(self._publications),
                "newest_publication": self.newest_publication,
            }

    def since(self, step: int) -> list[Trained]:
        """The steps to replay from `step` on, in order."""
        with self._lock:
            return [trained for trained in self._trained if trained.step >= step]
