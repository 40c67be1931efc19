"""Following the published weights: brought to this host in the background, applied when nothing forbids it.

    long-poll ─▶ newest publication ─▶ host's copy (thread) ─▶ ready ─▶ engine.load_weights ─▶ current ─▶ checksum
                                                                 │
                                          waits while a validation group pins the present weights

Only the newest matters: a publication that is overtaken before it is applied is never applied. Validation
groups and updates exclude each other: none is taken in (`may_pin`) once an update has begun.

A store that fails, or a version that cannot be read, stops nothing: generation goes on with the weights that are
there, the controller is informed (the trainer then attaches a full version to its next publication), and the newest
one is tried again for `weight_sync.store_timeout`. A replica without any weights gives up after `MAX_FAILURES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.client import ControllerError
from controller.client import calls as api
from rollout_worker.engines.base import Checksum, Engine, LoadReport, WeightMismatch
from rollout_worker.errors import WeightsUnreadableError
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.ranges import span
from rollout_worker.session import Session
from rollout_worker.weights.host_weights import Arrival, HostWeights
from rollout_worker.weights.update_reports import UpdateReports
from schema.config.sections.weight_sync import WeightSyncConfig
from schema.wire.weights import Publication
from weight_sync.errors import StoreError, WeightError
from weight_sync.host.files import CacheError
from weight_sync.host.host_copy import CopiedWeights
from weight_sync.host.locks import LockTimeoutError

log = logging.getLogger(__name__)

POLL_S = 20.0
MAX_FAILURES = 5
"""In a row, before this replica ever had weights: a machine that cannot read the store should say so soon."""
RETRY_S = 1.0
FLUSH_S = 5.0
"""Seconds for the controller to hear of a mismatch before the replica ends."""
MAX_NAMED = 5
"""Problems of a checksum that its error names."""


@dataclass(slots=True)
class _Failures:
    """Fetches that failed in a row."""

    count: int = 0
    since: float = 0.0
    reported: int = 0
    """Publication that was last reported as unreadable."""
    overtaken: bool = False
    """Whether one was passed over since there was a newer one."""

    def over(self, now: float, timeout: float, served: bool, refused: bool) -> bool:
        """Whether to give up. served: there are weights to go on with. refused: for good, or after all the
        tries that a store makes by itself."""
        return now - self.since > timeout or (not served and (refused or self.count >= MAX_FAILURES))


class WeightFollower:
    """Keeps the engine at the newest published weights."""

    def __init__(
        self,
        config: WeightSyncConfig,
        session: Session,
        engine: Engine,
        host: HostWeights,
        leases: LeaseTable,
        metrics: Metrics,
    ) -> None:
        self._config, self._session, self._engine, self._host = config, session, engine, host
        self._leases, self._metrics = leases, metrics
        self.reports = UpdateReports(session)
        self.current: Publication | None = None
        self._failure = ""
        self._fetching = 0
        self._ready: Arrival | None = None
        self._loading: Arrival | None = None
        self._unreported = 0
        """Bytes of arrivals that were overtaken before they were used: the next report has them too."""
        self._checked: Publication | None = None
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
        return self._loading is None and self.current is not None and self.current.version == version

    @property
    def fetching(self) -> int:
        """The oldest publication whose files are being read, or will be; 0: none."""
        for arrival in (self._loading, self._ready):
            if arrival is not None:
                return arrival.weights.publication.id
        return self._fetching

    @property
    def trouble(self) -> str:
        """Why newer weights do not come, for people; "" when all is well."""
        return self._host.trouble or self._failure

    # ---- bringing them here -------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Bring whatever is published to this host, for ever. Raises `WeightsUnreadableError` when it stays so."""
        known, failures = 0, _Failures()
        publication = self._session.reply.publication
        while True:
            if publication is not None:
                try:
                    known = max(publication.id, await self._fetch(publication))
                    failures, self._failure = _Failures(), ""
                except WeightError as error:
                    publication = await self._failed(publication, known, failures, error)
                    continue
            publication = await self._newer(known, POLL_S)

    async def _fetch(self, publication: Publication) -> int:
        """The id of what is here now: the publication's, or that of a newer one."""
        self._session.newest_publication = max(self._session.newest_publication, publication.id)
        self._fetching = publication.id
        try:
            arrival = await self._host.advance(publication)
        finally:
            self._fetching = 0
        weights = arrival.weights
        self._metrics.extra["fetch_seconds"] = weights.seconds["fetch"]
        if self.current is None or weights.publication.id > self.current.id:
            self._drop_ready()
            self._ready = arrival
            self._news.set()
        else:
            self._unreported += weights.n_bytes
        return weights.publication.id

    def _drop_ready(self) -> None:
        """Drop what is ready and will not be used, if there is something."""
        if self._ready is not None:
            self._unreported += self._ready.weights.n_bytes
        self._ready = None

    async def _failed(
        self, publication: Publication, known: int, failures: _Failures, error: WeightError
    ) -> Publication:
        """Return what to try next. Raises `WeightsUnreadableError` when it is time to give up."""
        newest = await self._newer(known, 0.0) or publication
        if newest.id > publication.id and not failures.overtaken:
            # It may have been removed because there is a newer one. Where the newer one fails as well that was not
            # it: a trainer that publishes faster than fetching fails must hear of it all the same.
            failures.overtaken = True
            log.info("publication %d cannot be read, trying the newer %d: %s", publication.id, newest.id, error)
            return newest
        now = time.monotonic()
        failures.count += 1
        failures.since = failures.since or now
        self._failure = f"publication {publication.id} (version {publication.version}) cannot be used: {error}"
        log.warning("%s (try %d)", self._failure, failures.count)
        # With no room here, or a store that refuses, the trainer cannot help.
        refused = isinstance(error, StoreError | CacheError)
        if failures.reported < publication.id and not refused and not isinstance(error, LockTimeoutError):
            failures.reported = publication.id
            self.reports.add(publication.id, "unreadable", str(error))
        if failures.over(now, self._config.store_timeout, self.current is not None, refused):
            raise WeightsUnreadableError(
                f"{self._failure} (tried {failures.count} times in {now - failures.since:.0f} s; "
                f"weight_sync.store_timeout = {self._config.store_timeout:g})"
            ) from error
        return await self._newer(publication.id, RETRY_S) or publication

    async def _newer(self, known: int, wait_s: float) -> Publication | None:
        return await self._session.call(
            lambda session: api.latest_publication(known, wait_s, session.replica_id, session.incarnation)
        )

    # ---- taking them into use -----------------------------------------------------------------------------

    async def update(self) -> None:
        """Apply what is here, for ever. Raises `EngineError`; of those `WeightMismatch` when what is served is not
        what the trainer published."""
        while True:
            await self._news.wait()
            self._news.clear()
            if self._ready is None or self._leases.pinned:
                continue
            arrival, self._loading, self._ready = self._ready, self._ready, None
            weights = arrival.weights
            try:
                with span("update"):
                    report = await self._engine.load_weights(weights, weights.publication.version)
            finally:
                self._loading = None
            publication = report.publication or weights.publication
            self.current = publication
            if self._ready is not None and self._ready.weights.publication.id <= publication.id:
                self._drop_ready()  # the host's copy was there already when the engine read it
            for callback in self._changed:
                callback()
            await self._settle(arrival, publication, report)

    async def _settle(self, arrival: Arrival, publication: Publication, report: LoadReport) -> None:
        """Compare, log and report what is in use now."""
        weights = arrival.weights
        checksum = await self._engine.checksum() if self._check_is_due(publication) else None
        problems = [] if checksum is None else _problems(publication, checksum)
        seconds = {
            **weights.seconds,
            "prepare": report.prepare_s,
            "pause": report.interrupted_s or report.pause_s,
            "apply": report.apply_s,
        }
        if report.mode == "full":
            seconds["read_back"] = report.verify_s
        if checksum is not None:
            seconds["checksum"] = checksum.seconds
        overtaken, self._unreported = self._unreported, 0
        self._log(weights, publication, report, seconds)
        self._metrics.extra.update(
            prepare_seconds=report.prepare_s,
            pause_seconds=seconds["pause"],
            apply_seconds=report.apply_s,
            verify_seconds=report.verify_s,
        )
        self.reports.add(
            publication.id,
            "applied",
            "; ".join(filter(None, (arrival.detail, report.detail))),
            mode=report.mode,
            transport=arrival.transport,
            n_bytes=weights.n_bytes + overtaken,
            seconds=seconds,
            served_hash=(checksum and checksum.content_hash) or "",
            differs=bool(problems),
        )
        if checksum is not None:
            try:
                self._compare(publication, checksum, problems)
            except WeightMismatch:
                with contextlib.suppress(TimeoutError, ControllerError):
                    async with asyncio.timeout(FLUSH_S):
                        await self.reports.flush()
                raise

    def _log(
        self, weights: CopiedWeights, publication: Publication, report: LoadReport, seconds: dict[str, float]
    ) -> None:
        density = "" if weights.density is None else f", {weights.density:.2%} of the elements changed"
        log.info(
            "weights of version %d in use (%s): %s bytes fetched%s; %s",
            publication.version,
            report.mode.replace("_", " "),
            f"{weights.n_bytes:,}",
            density,
            ", ".join(f"{stage.replace('_', ' ')} {value:.3f} s" for stage, value in seconds.items()),
        )

    def _check_is_due(self, publication: Publication) -> bool:
        """The first version is always compared, then every `weight_sync.checksum_interval`-th."""
        if self._checked is None:
            return True
        interval = self._config.checksum_interval
        return interval > 0 and abs(publication.version - self._checked.version) >= interval

    def _compare(self, publication: Publication, checksum: Checksum, problems: Sequence[str]) -> None:
        """Raises `WeightMismatch` when what is served is not what was published."""
        self._checked = publication
        if problems:
            raise WeightMismatch(
                f"the weights being served are not those of version {publication.version}: "
                f"{'; '.join(problems[:MAX_NAMED])}"
            )
        if checksum.content_hash is None:
            log.info("the engine cannot report the hash of the weights it serves")
        else:
            log.info(
                "the weights being served are those of version %d (%s)",
                publication.version,
                "bit by bit" if checksum.exact else "cast to the engine's type",
            )


def _problems(publication: Publication, checksum: Checksum) -> list[str]:
    """In what the weights being served are not those that were published; empty: in nothing that was compared."""
    if checksum.content_hash in (None, publication.content_hash):
        return checksum.problems
    return [
        *checksum.problems,
        f"their content hash is {checksum.content_hash}, the trainer's is {publication.content_hash}",
    ]
