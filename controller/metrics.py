"""Prometheus metrics, read from the state of the job when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.service import Controller
from schema.wire.messages import Phase

Samples = dict[tuple[str, ...], float]
"""Value by label values."""


class JobCollector(Collector):
    """Every metric carries the job's id."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        status, ledger = self._controller.operations.status(), self._controller.operations.ledger()
        job = status.job_id
        for name, text, value in (
            ("step", "Committed steps", status.step),
            ("total_steps", "Steps of the job", status.total_steps),
            ("timeline", "Rewinds so far", status.timeline),
            ("weight_version", "Newest published weight version, -1 before the first", status.version),
            ("samples_per_second", "Trained samples per second", status.samples_per_s),
            ("tokens_per_second", "Trained generated tokens per second", status.tokens_per_s),
            ("staleness_max", "Largest staleness ever trained, in steps", status.staleness_max),
            ("store_available", "Whether Redis takes writes", int(self._controller.job.store.available)),
        ):
            yield _gauge(name, text, {(): float(value)}, (), job)
        phases: Samples = {(phase.value,): float(phase is status.phase) for phase in Phase}
        yield _gauge("phase", "1 for the phase that the job is in", phases, ("phase",), job)
        replicas: Samples = {(role,): float(count) for role, count in status.replicas.items()}
        yield _gauge("replicas", "Live replicas", replicas, ("role",), job)
        idle: Samples = {(role,): value for role, value in status.idle.items()}
        yield _gauge(
            "idle_fraction", "Fraction of time without work since training began", idle, ("role",), job
        )
        groups: Samples = {(state,): float(count) for state, count in ledger.states.items()}
        yield _gauge("groups", "Groups by state", groups, ("state",), job)
        dropped = CounterMetricFamily("cosmos_groups_dropped", "Dropped groups", labels=("job", "reason"))
        for reason, count in ledger.dropped.items():
            dropped.add_metric((job, reason), count)
        yield dropped


def _gauge(name: str, text: str, values: Samples, labels: tuple[str, ...], job: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"cosmos_{name}", text, labels=("job", *labels))
    for key, value in values.items():
        family.add_metric((job, *key), value)
    return family
