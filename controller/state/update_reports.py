"""Reports of rollout replicas on weight versions: the newest reports, and sums for Prometheus.

Memory is bounded: the reports of the newest `PUBLICATIONS` publications, of each replica the last one, with at most
`REPLICAS` of them; of the known stages, texts cut to `DETAIL`. Sums are of this controller process, as Prometheus
expects of counters. A report that comes twice counts once.

Pure: time comes in as `now`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from schema.wire.messages import PublishRequest, ReplicaUpdate, UpdateReport
from schema.wire.weights import Publication

PUBLICATIONS = 64
REPLICAS = 1024
DETAIL = 512
STAGES = (
    "gather",
    "encode",
    "write",
    "wait",
    "fetch",
    "verify",
    "advance",
    "prepare",
    "pause",
    "apply",
    "read_back",
    "checksum",
)
"""Stages that have a histogram; labels of metrics are bounded, whatever is reported."""
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Upper ends in seconds: from a scatter in place to a large model over a slow link."""


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; the last one has no upper end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, value: float) -> None:
        bucket = next((i for i, end in enumerate(BUCKETS) if value <= end), len(BUCKETS))
        self.counts[bucket] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the buckets for Prometheus: (upper end, how many are not above it)."""
        ends, seen, rows = [*(f"{end:g}" for end in BUCKETS), "+Inf"], 0, []
        for end, count in zip(ends, self.counts, strict=True):
            seen += count
            rows.append((end, float(seen)))
        return rows


class Updates:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, tuple[bytes, ReplicaUpdate]]] = {}
        """By publication and replica: a hash of the report, and what is shown of it."""
        self.seconds = {stage: Histogram() for stage in STAGES}
        self.published: Counter[str] = Counter()
        """Publications by kind."""
        self.published_bytes: Counter[str] = Counter()
        self.fetched_bytes = 0
        self.applied: Counter[tuple[str, str]] = Counter()
        """Updates by transport and mode."""
        self.checks: Counter[bool] = Counter()
        """Comparisons of served weights with the trainer's, by whether they were equal."""
        self.unreadable = 0
        self.fallbacks = 0
        """Updates through the store where the transport should have been another."""
        self.anchors_wanted = 0

    def of(self, publication_id: int) -> list[ReplicaUpdate]:
        """The reports of a publication, the newest last."""
        return [update for _, update in self._reports.get(publication_id, {}).values()]

    @property
    def pause(self) -> float | None:
        """Seconds of the longest pause at the newest publication that was applied; None: none is known."""
        for publication_id in sorted(self._reports, reverse=True):
            applied = [update for update in self.of(publication_id) if update.status == "applied"]
            pauses = [update.seconds["pause"] for update in applied if "pause" in update.seconds]
            if pauses:
                return max(pauses)
        return None

    def publish(self, request: PublishRequest) -> None:
        """Count a new publication."""
        self.published[request.kind] += 1
        self.published_bytes[request.kind] += request.n_bytes
        self._time(request.metrics)

    def report(self, publication: Publication, report: UpdateReport, wanted: str, now: float) -> bool:
        """Take a report; whether it is a new one. wanted: the transport of the configuration."""
        reports = self._reports.setdefault(publication.id, {})
        known, digest = reports.get(report.replica_id), _hash(report)
        if known is not None and known[0] == digest:
            return False
        update = ReplicaUpdate(
            replica_id=report.replica_id,
            at=now,
            status=report.status,
            transport=report.transport,
            mode=report.mode,
            checked=is_equal(publication, report),
            n_bytes=report.n_bytes,
            seconds={stage: value for stage, value in report.seconds.items() if stage in self.seconds},
            detail=report.detail[:DETAIL],
        )
        reports.pop(report.replica_id, None)
        reports[report.replica_id] = digest, update
        self._forget(reports)
        self._count(update, wanted)
        return True

    def _forget(self, reports: dict[str, tuple[bytes, ReplicaUpdate]]) -> None:
        if len(reports) > REPLICAS:
            del reports[next(iter(reports))]
        if len(self._reports) > PUBLICATIONS:
            del self._reports[min(self._reports)]

    def _count(self, update: ReplicaUpdate, wanted: str) -> None:
        self.fetched_bytes += update.n_bytes
        self._time(update.seconds)
        if update.checked is not None:
            self.checks[update.checked] += 1
        if update.status == "unreadable":
            self.unreadable += 1
        else:
            self.applied[update.transport, update.mode] += 1
            self.fallbacks += update.transport != wanted

    def _time(self, seconds: Mapping[str, float]) -> None:
        for stage, value in seconds.items():
            if stage in self.seconds:
                self.seconds[stage].add(value)


def is_equal(publication: Publication, report: UpdateReport) -> bool | None:
    """Whether a replica serves what was published; None: it did not compare."""
    if report.differs:
        return False
    return report.served_hash == publication.content_hash if report.served_hash else None


def _hash(report: UpdateReport) -> bytes:
    return hashlib.sha256(report.model_dump_json().encode()).digest()
