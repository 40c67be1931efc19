"""Users look at the job and operate it.

pause       no further leases and batches; what is leased or batched goes on
resume      back to work; a stopped or failed job is opened again (the launcher does so with --resume)
stop        ends the job: leases answer `finished`, replicas get the command `stop`
checkpoint  the trainer saves one after the step it is at
fail        ends the job as failed (the launcher does so when a restart budget is used up)
"""

from __future__ import annotations

from statistics import fmean
from typing import Literal

from controller.errors import ApiError
from controller.ledger.group import DONE, Group, GroupState
from controller.state.job import JobState
from controller.state.situation import RECENT, advice, sentence
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, Phase
from schema.wire.messages.members import MembersStatus, MemberStatus

Action = Literal["pause", "resume", "stop", "checkpoint"]


class JobService:
    """The calls of users and of the launcher."""

    def __init__(self, job: JobState) -> None:
        self._job = job

    async def operate(self, action: Action) -> m.JobStatus:
        """Do it, or refuse it in a job that has ended; durable when answered: no other caller would repeat it.

        Raises `ApiError`, `StoreUnavailable`.
        """
        job = self._job
        job.store.require()
        if action == "resume" and job.phase in (Phase.STOPPED, Phase.FAILED):
            job.reopen()
        elif job.ended and action != "stop":
            raise ApiError(ErrorCode.CONFLICT, f"the job is {job.phase}: it cannot {action}")
        elif action == "pause" and not job.config.is_grpo:
            detail = "a supervised trainer reads its own data and cannot be paused: stop it and resume later"
            raise ApiError(ErrorCode.CONFLICT, detail)
        elif action == "stop":
            job.end(Phase.STOPPED)
        elif action == "checkpoint":
            job.checkpoint_asked = True
        else:
            job.facts.paused = action == "pause"
            if not job.facts.paused:
                job.reset_rewards()
                job.steps.begin_window()
            job.wake_all()
        await job.save_durably()
        return self.status()

    async def fail(self, reason: str) -> m.JobStatus:
        """End the job as failed; a job that has ended stays as it is."""
        self._job.store.require()
        self._job.end(Phase.FAILED, reason or "no reason was given")
        await self._job.save_durably()
        return self.status()

    def status(self) -> m.JobStatus:
        """Everything the display shows."""
        job = self._job
        progress, newest, last = job.progress, job.publications.newest, job.steps.last
        speed = job.steps.overall() if job.ended or progress.finished else job.steps.recent()
        remaining = progress.total_steps - progress.committed
        over = job.ended or progress.finished
        metrics = {} if last is None else last.metrics
        waits_for, since = sentence(job)
        status = m.JobStatus(
            job_id=job.job_id,
            name=job.config.logging.experiment_name or job.run_dir.name,
            project=job.config.logging.project_name,
            mode="grpo" if job.config.is_grpo else "sft",
            phase=job.phase,
            step=progress.committed,
            total_steps=progress.total_steps,
            timeline=progress.timeline,
            version=-1 if newest is None else newest.version,
            publication=0 if newest is None else newest.id,
            weights=self._weights(),
            started_at=job.facts.started_at,
            first_step_at=job.steps.first_at,
            updated_at=job.wall(),
            samples_per_s=speed.samples_per_s,
            tokens_per_s=speed.tokens_per_s,
            eta_s=None if over or speed.step_s is None else remaining * speed.step_s,
            reward=job.facts.last_score if (reward := job.steps.newest("reward_mean")) is None else reward,
            validation=next(reversed(job.validation.records.values()), None),
            validating=self._validating(),
            staleness_mean=metrics.get("staleness_mean"),
            staleness_max=max(progress.totals.staleness, default=0),
            queue_ready=progress.ready,
            outstanding=progress.outstanding,
            replicas={role: len(job.registry.present(role)) for role in ("policy", "rollout")},
            idle=self._idle(metrics, over),
            members=self._members(),
            metrics=metrics,
            last_error=job.facts.last_error,
            note=job.note,
            traceback=job.facts.traceback,
            sentence=waits_for,
            sentence_since=since,
            rewards=self._rewards() if job.config.generates else None,
            alarms=[m.Alarm(name=name, text=text) for name, text in job.alarms.active.items()],
        )
        if over or not job.config.is_grpo:
            return status
        suggestions = advice(
            status.idle,
            [record.metrics for record in job.steps.ends(RECENT)],
            None if status.rewards is None else status.rewards.wait_fraction,
            rollouts=status.replicas["rollout"],
            bound=job.config.staleness_bound,
            overlaps=not job.config.shares_time,
        )
        return status.model_copy(update={"advice": suggestions})

    def _validating(self) -> tuple[int, int] | None:
        validation = self._job.validation
        if not validation.running:
            return None
        done = sum(len(group.samples) for group in validation.groups)
        return done, validation.n_samples

    def _members(self) -> MembersStatus | None:
        membership = self._job.membership
        if membership is None:
            return None
        members = [
            MemberStatus(replica_id=name, parts=len(member.parts), seconds=member.seconds)
            for name, member in membership.members.items()
        ]
        return MembersStatus(
            epoch=membership.epoch, parts=membership.parts, members=members, waiting=list(membership.waiting)
        )

    def _rewards(self) -> m.RewardStatus:
        stats = self._job.reward_stats
        gauges = [replica.gauges for replica in self._job.registry.present("rollout")]
        total = self._job.registry.total
        lived = total("leased_seconds")
        waited, attempts = total("reward_wait_seconds"), total("reward_attempts")
        return m.RewardStatus(
            scored=stats.scored,
            failed=dict(stats.failed.most_common()),
            timeouts=stats.timeouts,
            seconds_mean=stats.seconds / stats.timed if stats.timed else None,
            retried=int(total("reward_retried")),
            attempt_seconds_mean=total("reward_seconds") / attempts if attempts else None,
            scoring=int(sum(replica_gauges.get("scoring", 0.0) for replica_gauges in gauges)),
            oldest_s=max((replica_gauges.get("scoring_oldest_s", 0.0) for replica_gauges in gauges), default=0.0),
            wait_seconds=waited,
            wait_fraction=min(waited / lived, 1.0) if lived else None,
        )

    def _weights(self) -> m.WeightsStatus | None:
        updates, entry = self._job.updates, self._job.publications.newest_entry
        if entry is None:
            return None
        publication = entry.publication
        here = {replica.replica_id for replica in self._job.registry.present("rollout")}
        applied = [u.replica_id for u in updates.of(publication.id) if u.status == "applied"]
        return m.WeightsStatus(
            version=publication.version,
            publication=publication.id,
            kind=publication.kind,
            n_bytes=publication.n_bytes,
            ratio=entry.ratio,
            density=entry.cost.density,
            updated=len(here.intersection(applied)),
            pause_s=updates.pause,
            unreadable=updates.unreadable,
        )

    def _idle(self, metrics: dict[str, float], over: bool) -> dict[str, float]:
        """Idle fraction by role: the trainer's own metric, and the mean over rollout replicas that are present; once
        the job is over and none is, over all that there were."""
        idle = {"policy": metrics["idle_fraction"]} if "idle_fraction" in metrics else {}
        rollouts = [replica for replica in self._job.registry if replica.role == "rollout"]
        present = [replica for replica in rollouts if replica.present] or (rollouts if over else [])
        gauges = [r.gauges["idle_fraction"] for r in present if "idle_fraction" in r.gauges]
        if gauges:
            idle["rollout"] = fmean(gauges)
        return idle

    def groups(self, state: GroupState | None, offset: int, limit: int) -> list[Group]:
        """Groups in the order of the stream."""
        table = self._job.require_ledger().table
        if state is None:
            return table.in_order(offset, limit)
        if state in DONE or state is GroupState.DROPPED:
            known = [group for group in table.in_order(0, table.frontier) if group.state is state]
        else:
            known = sorted(table.in_state(state), key=lambda group: (group.epoch, group.position))
        return known[offset : offset + limit]
