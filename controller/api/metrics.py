"""Prometheus metrics, read from the state of the job when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.services.controller import Controller
from schema.scores.summary import estimates_of
from schema.wire.messages import JobStatus, Phase, WeightsStatus

Samples = dict[tuple[str, ...], float]
"""Value by label values."""
STALENESS_ENDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Upper ends of the buckets, in steps."""


class JobCollector(Collector):
    """Every metric carries the job's id."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        status, ledger = self._controller.job_service.status(), self._controller.job.progress.status()
        job = status.job_id
        for name, text, value in (
            ("step", "Committed steps", status.step),
            ("total_steps", "Steps of the job", status.total_steps),
            ("timeline", "Rewinds so far", status.timeline),
            ("weight_version", "Newest published weight version, -1 before the first", status.version),
            ("samples_per_second", "Samples of committed steps per second", status.samples_per_s),
            ("tokens_per_second", "Tokens of committed steps per second", status.tokens_per_s),
            ("staleness_max", "Largest staleness ever trained, in steps", status.staleness_max),
            ("store_available", "Whether Redis takes writes", int(self._controller.job.store.available)),
        ):
            yield _gauge(name, text, {(): float(value)}, (), job)
        phases: Samples = {(phase.value,): float(phase is status.phase) for phase in Phase}
        yield _gauge("phase", "1 for the phase that the job is in", phases, ("phase",), job)
        replicas: Samples = {(role,): float(count) for role, count in status.replicas.items()}
        yield _gauge("replicas", "Live replicas", replicas, ("role",), job)
        idle: Samples = {(role,): value for role, value in status.idle.items()}
        yield _gauge("idle_fraction", "Fraction of time without work since training began", idle, ("role",), job)
        groups: Samples = {(state,): float(count) for state, count in ledger.states.items()}
        yield _gauge("groups", "Groups by state", groups, ("state",), job)
        dropped = CounterMetricFamily("cosmos_groups_dropped", "Dropped groups", labels=("job", "reason"))
        for reason, count in ledger.dropped.items():
            dropped.add_metric((job, reason), count)
        yield dropped
        yield _staleness(ledger.staleness, job)
        yield from _rewards(status, job)
        metrics: Samples = {(name,): value for name, value in status.metrics.items()}
        yield _gauge("metric", "Metrics of the last committed step", metrics, ("name",), job)
        if (last := status.validation) is not None:
            for name, what, number in (
                ("score", "Mean score", last.score_mean),
                ("loss", "Loss", last.loss),
                ("accuracy", "Accuracy", last.accuracy),
            ):
                if number is not None:
                    yield _gauge(f"validation_{name}", f"{what} of the last validation", {(): number}, (), job)
            if last.scores is not None:
                values: Samples = {
                    (source, name): estimate.value
                    for source, scores in {"": last.scores, **last.sources}.items()
                    for name, estimate in estimates_of(scores).items()
                }
                text = "mean@n, pass@k, maj@n and best@n of the last validation; no source: of all"
                yield _gauge("validation_estimate", text, values, ("source", "name"), job)
        alarms: Samples = {(alarm.name,): 1.0 for alarm in status.alarms}
        yield _gauge("alarm", "1 for each alarm that is on", alarms, ("name",), job)
        yield from self._weights(status.weights, job)
        yield from self._autoscale(job)

    def _autoscale(self, job: str) -> Iterator[Metric]:
        """Yield the desired number of rollout replicas, and the measures that it follows from."""
        status = self._controller.autoscale.status()
        desired: Samples = {(): float(status.desired)}
        yield _gauge("autoscale_desired", "Rollout replicas that there should be", desired, (), job)
        if (seen := status.measures) is not None:
            for name, text, value in (
                ("wait_fraction", "Share of its time that the trainer waited for samples", seen.wait),
                ("throttled_fraction", "Share of what replicas could hold and the bound refused", seen.throttled),
                ("need", "Rollout replicas with which neither side would wait", seen.need),
            ):
                yield _gauge(f"autoscale_{name}", text, {(): value}, (), job)

    def _weights(self, weights: WeightsStatus | None, job: str) -> Iterator[Metric]:
        """Yield what versions cost: sums of this process, and the newest one."""
        updates = self._controller.job.updates
        seconds = HistogramMetricFamily(
            "cosmos_weights_seconds", "Seconds of each stage of a weight version", labels=("job", "stage")
        )
        for stage, histogram in updates.seconds.items():
            seconds.add_metric((job, stage), histogram.cumulative(), histogram.total)
        yield seconds
        for name, text, labels, values in (
            ("publications", "Published weight versions", ("kind",), _by(updates.published)),
            ("published_bytes", "Bytes of published weight versions", ("kind",), _by(updates.published_bytes)),
            ("fetched_bytes", "Bytes that replicas fetched", (), {(): float(updates.fetched_bytes)}),
            (
                "updates",
                "Updates of replicas",
                ("transport", "mode"),
                {key: float(count) for key, count in updates.applied.items()},
            ),
            (
                "checks",
                "Comparisons of served weights with the trainer's",
                ("result",),
                {("equal" if equal else "different",): float(n) for equal, n in updates.checks.items()},
            ),
            ("unreadable", "Reports that a version could not be read", (), {(): float(updates.unreadable)}),
            ("fallbacks", "Updates by another transport than chosen", (), {(): float(updates.fallbacks)}),
            ("anchors_wanted", "Full versions asked for", (), {(): float(updates.anchors_wanted)}),
        ):
            counter = CounterMetricFamily(f"cosmos_weights_{name}", text, labels=("job", *labels))
            for key, value in values.items():
                counter.add_metric((job, *key), value)
            yield counter
        newest = {} if weights is None else {
            "bytes": weights.n_bytes, "ratio": weights.ratio, "density": weights.density
        }  # fmt: skip
        for name, number in newest.items():
            if number is not None:
                yield _gauge(f"weights_{name}", f"Of the newest version: {name}", {(): float(number)}, (), job)


def _rewards(status: JobStatus, job: str) -> Iterator[Metric]:
    rewards = status.rewards
    if rewards is None:
        return
    scored = CounterMetricFamily("cosmos_rewards_scored", "Samples that were scored", labels=("job",))
    scored.add_metric((job,), rewards.scored)
    yield scored
    failed = CounterMetricFamily("cosmos_rewards_failed", "Samples whose rewards failed", labels=("job", "kind"))
    for kind, count in rewards.failed.items():
        failed.add_metric((job, kind), count)
    yield failed
    for name, text, value in (
        ("timeouts", "Samples whose rewards timed out or could not connect", rewards.timeouts),
        ("retried", "Attempts that failed and were followed by another", rewards.retried),
        ("attempt_seconds", "Seconds of a reward process per attempt", rewards.attempt_seconds_mean),
        ("scoring", "Samples that are being scored", rewards.scoring),
        ("wait_seconds", "Seconds that engines stood idle for rewards", rewards.wait_seconds),
        ("wait_fraction", "Share of the time that engines stood idle for rewards", rewards.wait_fraction),
    ):
        if value is not None:
            yield _gauge(f"rewards_{name}", text, {(): float(value)}, (), job)


def _by(counts: Mapping[str, int]) -> Samples:
    return {(key,): float(count) for key, count in counts.items()}


def _staleness(counts: Mapping[int, int], job: str) -> HistogramMetricFamily:
    """Trained samples by the age of their oldest token, in steps; none is above the last end of use."""
    family = HistogramMetricFamily("cosmos_staleness", "Staleness of trained samples, in steps", labels=("job",))
    total = float(sum(counts.values()))
    ends = [(str(end), float(sum(n for age, n in counts.items() if age <= end))) for end in STALENESS_ENDS]
    family.add_metric((job,), [*ends, ("+Inf", total)], float(sum(age * n for age, n in counts.items())))
    return family


def _gauge(name: str, text: str, values: Samples, labels: tuple[str, ...], job: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cosmos_{name}", text, labels=("job", *labels))
    for key, value in values.items():
        family.add_metric((job, *key), value)
    return family
