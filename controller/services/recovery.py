"""Trainers that know more than the store: their calls to declare themselves and to replay what it lost.

What is to be done is decided in `controller.ledger.reconcile`; here it is carried out on the parts of the job.
"""

from __future__ import annotations

import logging

from controller.errors import ApiError
from controller.ledger.reconcile import Claim, FromSnapshot, Known, NeedSnapshot, Refuse, ResendSteps, decide
from controller.ledger.rejoin import recommit
from controller.ledger.step_counter import StepCounter
from controller.services.samples import SampleService
from controller.state.job import JobState
from controller.state.replicas import id_of
from controller.state.step_log import mean_score, own_counts
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, Phase
from schema.wire.messages.recovery import DeclareReply, DeclareRequest, ReplayRequest

log = logging.getLogger(__name__)


class RecoveryService:
    """The calls by which a trainer brings the controller up to its own state."""

    def __init__(self, job: JobState, samples: SampleService) -> None:
        self._job, self._samples = job, samples

    async def declare(self, replica_id: str, request: DeclareRequest) -> DeclareReply:
        """Take a trainer's registration and publications back, and say which steps are missing.

        Raises:
            ApiError: another trainer has taken its place, or what it says cannot be.
        """
        job = self._job
        job.store.require()
        if replica_id != id_of(request.name, request.incarnation):
            detail = f"replica {replica_id} is not incarnation {request.incarnation} of {request.name!r}"
            raise ApiError(ErrorCode.STALE_INCARNATION, detail)
        if job.facts.ended in (Phase.FAILED, Phase.STOPPED):
            raise ApiError(ErrorCode.JOB_FAILED, f"the job is {job.facts.ended}")
        decision = decide(self._known(), _claim(request))
        if isinstance(decision, Refuse):
            raise ApiError(decision.code, f"trainer {request.name!r}: {decision.reason}")
        before = job.registry.by_name(request.name)
        job.registry.restore(request, job.clock())
        anew = request.policy_epoch > job.facts.policy_epoch
        job.facts.policy_epoch = request.policy_epoch
        timeline = job.progress.timeline
        if not isinstance(decision, NeedSnapshot):
            self._carry_out(decision, request)
        if job.membership is not None:
            if before is not None and before.replica_id != replica_id:
                job.membership.gone(before.replica_id)
            floor, committed = int(job.wall() * 1000), job.progress.committed
            job.membership.recover(replica_id, committed, floor, leads=request.leads, anew=anew)
            job.member_signal.notify()
        if isinstance(decision, NeedSnapshot):
            await job.save()
            return self._reply(decision.missing, needs_snapshot=True)
        log.warning(
            "trainer %s declared itself: %d steps are known, it has %d", replica_id, decision.step, request.steps
        )
        reply = self._reply(decision.step)
        await job.save_durably()
        if job.progress.timeline != timeline:
            await self._samples.restore()
        return reply

    def _known(self) -> Known:
        job = self._job
        return Known(job.facts.policy_epoch, job.progress.timeline, job.progress.committed)

    def _reply(self, replay_from: int, *, needs_snapshot: bool = False) -> DeclareReply:
        durable = self._job.progress.durable
        return DeclareReply(replay_from=replay_from, needs_snapshot=needs_snapshot, durable_steps=durable)

    def _carry_out(self, decision: ResendSteps | FromSnapshot, request: DeclareRequest) -> None:
        job = self._job
        if isinstance(decision, FromSnapshot):
            assert request.snapshot is not None
            job.begin_from(request.snapshot, request.timeline, request.began)
        elif decision.back_to is not None:
            job.rewind(decision.back_to, request.timeline)
        job.publications.heard(request.newest_publication)
        job.publications.declare(request.publications, request.timeline)
        newest = job.publications.newest
        if newest is not None:
            job.validation.published(newest.version, final=False)
        job.wake_all()

    async def recommit(self, step: int, request: ReplayRequest) -> m.CommitReply:
        """Commit a step that the store has lost, as it was trained. Raises `ApiError`."""
        job = self._job
        job.store.require()
        if request.policy_epoch != job.facts.policy_epoch:
            detail = f"policy epoch {request.policy_epoch} is not the current one, {job.facts.policy_epoch}"
            raise ApiError(ErrorCode.STALE_EPOCH, detail)
        job.acting(request.replica_id, request.incarnation, "policy")
        work = self._recommit(step, request)
        if work is not None:
            record = m.StepRecord(step=step, at=request.at, metrics=request.metrics)
            job.trained(record, *work, request.validations)
        reply = job.commit_reply(publish=False)
        await job.save()
        return reply

    def _recommit(self, step: int, request: ReplayRequest) -> tuple[int, int, float | None] | None:
        """Samples, generated tokens, mean score; None if the step was known."""
        progress, batch = self._job.progress, request.table
        if isinstance(progress, StepCounter):
            return (*own_counts(request.metrics), None) if progress.commit(step) else None
        if batch is None or batch.step != step or batch.timeline != progress.timeline:
            raise ApiError(
                ErrorCode.BAD_REQUEST,
                f"the replay of step {step} of timeline {progress.timeline} needs the table of its batch",
            )
        if not recommit(progress, batch):
            return None
        rows = batch.sampled
        tokens = sum(batch.response_tokens[row] for row in rows)
        return len(rows), tokens, mean_score([batch.score[row] for row in rows])


def _claim(request: DeclareRequest) -> Claim:
    snapshot = request.snapshot
    return Claim(
        policy_epoch=request.policy_epoch,
        timeline=request.timeline,
        began=request.began,
        first=request.first,
        steps=request.steps,
        since=request.since,
        snapshot_step=None if snapshot is None else snapshot.committed_steps,
        snapshot_timeline=0 if snapshot is None else snapshot.timeline,
    )
