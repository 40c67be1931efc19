"""Following the published weights: fetched and proven in the background, applied when nothing forbids it.

    long-poll ─▶ newest publication ─▶ fetch and verify (thread) ─▶ ready ─▶ engine.load_weights ─▶ current
                                                                      │
                                               waits while a validation group pins the present weights

Only the newest matters: a publication that is overtaken before it is applied is never applied. Validation
groups and updates exclude each other: none is taken in (`may_pin`) once an update has begun.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from controller import api
from rollout_worker.engines.base import Engine
from rollout_worker.gauges import Gauges
from rollout_worker.held import Held
from rollout_worker.session import Session
from schema.wire.weights import Publication
from weight_sync import WeightError, Weights, fetch

log = logging.getLogger(__name__)

POLL_S = 20.0
MAX_FAILURES = 5
"""Fetches in a row that may fail. A version that is collected while it is fetched fails once; a store that
this machine cannot read fails always."""
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Fetched:
    publication: Publication
    weights: Weights


class WeightFollower:
    """Keeps the engine at the newest published weights."""

    def __init__(self, session: Session, engine: Engine, held: Held, gauges: Gauges) -> None:
        self._session, self._engine, self._held, self._gauges = session, engine, held, gauges
        self.current: Publication | None = None
        self._ready: Fetched | None = None
        self._updating = False
        self._news = asyncio.Event()
        self._changed: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back whenever new weights are in use."""
        self._changed.append(callback)

    def look_again(self) -> None:
        """Something that forbade an update may be over."""
        self._news.set()

    def may_pin(self, version: int) -> bool:
        """Whether groups pinned to `version` can be taken in now."""
        return not self._updating and self.current is not None and self.current.version == version

    async def follow(self) -> None:
        """Fetch whatever is published, for ever. Raises `WeightError` when it stays unreadable."""
        known, failures = 0, 0
        publication = self._session.reply.publication
        while True:
            if publication is not None:
                try:
                    await self._fetch(publication)
                    known, failures = publication.id, 0
                except WeightError as error:
                    failures += 1
                    log.warning("publication %d cannot be used (%d): %s", publication.id, failures, error)
                    if failures == MAX_FAILURES:
                        raise
                    await asyncio.sleep(RETRY_S)
            publication = await self._newer(known)

    async def _newer(self, known: int) -> Publication | None:
        return await self._session.call(lambda _: api.latest_publication(known, POLL_S))

    async def _fetch(self, publication: Publication) -> None:
        began = time.monotonic()
        self._session.newest_publication = max(self._session.newest_publication, publication.id)
        weights = await asyncio.to_thread(fetch, self._session.reply.weight_store, publication)
        self._gauges.extra["fetch_seconds"] = time.monotonic() - began
        self._ready = Fetched(publication, weights)
        self._news.set()

    async def update(self) -> None:
        """Apply what is fetched, for ever. Raises `EngineError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._ready is None or self._held.pinned:
                continue
            fetched, self._ready = self._ready, None
            self._updating = True
            try:
                report = await self._engine.load_weights(fetched.weights, fetched.publication.version)
            finally:
                self._updating = False
            self.current = fetched.publication
            log.info(
                "weights of version %d in use (pause %.3f s, apply %.3f s, verify %.3f s)",
                fetched.publication.version,
                report.pause_s,
                report.apply_s,
                report.verify_s,
            )
            self._gauges.extra.update(
                pause_seconds=report.pause_s, apply_seconds=report.apply_s, verify_seconds=report.verify_s
            )
            for callback in self._changed:
                callback()
