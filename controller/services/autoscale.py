"""How many rollout replicas the job should have: seen here, decided in `controller.autoscale`.

Whoever starts and ends replicas asks for the number and obeys it: the launcher, KEDA, `cosmos-launch autoscale`.
"""

from __future__ import annotations

import logging

from controller.autoscale.autoscaler import Decision
from controller.autoscale.scaling import Sight
from controller.errors import ApiError
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.services.leases import LeaseService
from controller.state.job import JobState
from schema.util.text import one_line
from schema.wire.messages import ErrorCode, EventKind
from schema.wire.messages.autoscale import MOST_REASON, AutoscaleStatus, Measures, ScaleRequest

log = logging.getLogger(__name__)

NO_REPLICAS = "supervised training has no rollout replicas"


class AutoscaleService:
    """See the module's docstring."""

    def __init__(self, job: JobState, leases: LeaseService) -> None:
        self._job, self._leases = job, leases
        self._said = (job.scaling.autoscaler.memory.desired, "unknown")

    def tick(self, now: float) -> None:
        """Look at the job; decide, where that is due."""
        job = self._job
        if not job.config.autoscale.enable or not isinstance(job.ledger, Ledger):
            return
        decision = job.scaling.look(now, self._sight(job.ledger))
        if decision is not None:
            self._tell(decision)

    def _sight(self, ledger: Ledger) -> Sight:
        job = self._job
        refused = self._leases.refused
        return Sight(
            leasing=[replica.replica_id for replica in job.registry.present("rollout") if replica.publication_id],
            held=ledger.table.leased,
            asked=sum(refused.values()),
            empty=sum(name not in ledger.table.by_replica for name in refused),
            ready=ledger.became_ready,
            tokens=ledger.ready_tokens,
            stored=ledger.table.ready,
            begins=not job.progress.committed,
            hold=self._hold(),
            over=f"the job is {job.phase}" if job.ended else "",
            left=job.progress.total_steps - job.progress.committed,
        )

    def _hold(self) -> str:
        """Why what is measured now says nothing of supply and demand; empty: nothing holds the job up."""
        job = self._job
        if job.facts.paused:
            return "the job is paused"
        if job.rewards.outage is not None:
            return job.rewards.note
        if job.publications.newest is None:
            return "no weights have been published yet"
        if isinstance(job.progress, GroupTable) and job.progress.awaits_rows:
            return "rows are being prepared"
        return "all steps are trained" if job.progress.finished else ""

    def _tell(self, decision: Decision) -> None:
        """An event for each number, and for each kind of reason."""
        job, (before, kind) = self._job, self._said
        if (decision.desired, decision.kind) == (before, kind):
            return
        self._said = decision.desired, decision.kind
        changed = decision.desired != before
        text = f"{before} → {decision.desired} rollout replicas" if changed else f"{before} rollout replicas stay"
        measures, reason = self._measures(), _bounded(decision.reason)
        job.events.add(
            EventKind.SCALE,
            f"{text}: {reason}",
            desired=decision.desired,
            before=before,
            replicas=len(job.registry.present("rollout")),
            working=job.scaling.working,
            why=decision.kind,
            reason=reason,
            measures=None if measures is None else measures.model_dump(),
        )
        if changed:
            log.info("%s: %s", text, reason)

    # ---- calls --------------------------------------------------------------------------------------------

    def status(self) -> AutoscaleStatus:
        """The number now, and why."""
        job, autoscaler, enabled = self._job, self._job.scaling.autoscaler, self._job.config.autoscale.enable
        limits, memory = autoscaler.limits, autoscaler.memory
        if job.ended:
            desired, reason = 0, f"the job is {job.phase}"
        elif not job.config.is_grpo:
            desired, reason = 0, NO_REPLICAS
        elif not enabled:
            desired, reason = memory.desired, "autoscale.enable = false: as many as at the start"
        else:
            desired, reason = autoscaler.last.desired, autoscaler.last.reason
        return AutoscaleStatus(
            enabled=enabled,
            desired=desired,
            replicas=len(job.registry.present("rollout")),
            working=job.scaling.working,
            minimum=limits.minimum,
            maximum=limits.maximum,
            manual=enabled and memory.manual is not None,
            final=job.ended,
            reason=_bounded(reason),
            since=memory.changed_at or job.facts.started_at,
            start_s=autoscaler.start_time if enabled else None,
            measures=self._measures(),
        )

    def _measures(self) -> Measures | None:
        measured = self._job.scaling.measured
        if measured is None:
            return None
        return Measures(
            seconds=measured.seconds,
            wait=measured.wait,
            throttled=measured.throttled,
            demand=measured.demand,
            rate=measured.rate,
            need=measured.need,
            replicas=measured.replicas,
            capacity=measured.capacity,
            lease_age_s=measured.lease_age,
            tokens_per_s=measured.tokens_per_s,
        )

    async def request(self, request: ScaleRequest) -> AutoscaleStatus:
        """A number by hand, until it is taken back; durable when answered. Raises `ApiError`, `StoreUnavailable`."""
        job = self._job
        job.store.require()
        if not job.config.is_grpo:
            raise ApiError(ErrorCode.CONFLICT, NO_REPLICAS)
        if not job.config.autoscale.enable:
            detail = (
                "autoscale.enable = false: the number of rollout replicas does not change; go on with "
                f"cosmos-launch --resume {job.run_dir} --set autoscale.enable=true"
            )
            raise ApiError(ErrorCode.CONFLICT, detail)
        if job.ended:
            raise ApiError(ErrorCode.CONFLICT, f"the job is {job.phase}: it needs no replica any more")
        try:
            decision = job.scaling.autoscaler.request(job.clock(), request.replicas)
        except ValueError as error:
            raise ApiError(ErrorCode.BAD_REQUEST, str(error)) from None
        self._tell(decision)
        await job.save_durably()
        return self.status()


def _bounded(reason: str) -> str:
    """Return a reason as messages carry it: it may hold what others wrote."""
    return one_line(reason)[:MOST_REASON]
