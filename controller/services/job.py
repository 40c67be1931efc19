"""What users do: look at the job and operate it.

pause       no further leases and batches; what is leased or batched goes on
resume      back to work; a stopped or failed job is opened again (the launcher does so with --resume)
stop        ends the job: leases answer `finished`, replicas get the command `stop`
checkpoint  the trainer saves one after the step it is at
fail        ends the job as failed (the launcher does so when a restart budget is used up)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Literal

from controller.ledger.group import Group, State
from controller.services.errors import ProblemError
from controller.state.job import Job
from controller.state.replicas import Replica
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, Phase
from schema.wire.payload_file import resolve

Action = Literal["pause", "resume", "stop", "checkpoint"]


class Operations:
    """The calls of users and of the launcher."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def operate(self, action: Action) -> m.JobStatus:
        """Do it, or refuse it in a job that has ended; durable when answered: nobody else would tell it again.

        Raises `ProblemError`, `StoreUnavailable`.
        """
        job = self._job
        job.store.require()
        if action == "resume" and job.phase in (Phase.STOPPED, Phase.FAILED):
            job.reopen()
        elif job.ended and action != "stop":
            raise ProblemError(ErrorCode.CONFLICT, f"the job is {job.phase}: it cannot {action}")
        elif action == "pause" and job.ledger is None:
            detail = "a supervised trainer reads its own data and cannot be paused: stop it and resume later"
            raise ProblemError(ErrorCode.CONFLICT, detail)
        elif action == "stop":
            job.end(Phase.STOPPED)
        elif action == "checkpoint":
            job.checkpoint_asked = True
        else:
            job.facts.paused = action == "pause"
            if not job.facts.paused:
                job.reset_rewards()
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
        ledger = job.ledger
        records = job.validation.records if job.validation is not None else {}
        return m.JobStatus(
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
            reward=metrics.get("reward_mean", job.facts.last_score),
            validation=list(records.values())[-1] if records else None,
            staleness_mean=metrics.get("staleness_mean"),
            staleness_max=0 if ledger is None else max(ledger.totals.staleness, default=0),
            queue_ready=0 if ledger is None else ledger.ready,
            outstanding=0 if ledger is None else ledger.outstanding,
            replicas={role: len(job.registry.present(role)) for role in ("policy", "rollout")},
            idle=self._idle(metrics),
            metrics=metrics,
            last_error=job.facts.last_error,
            note=job.note,
            traceback=job.facts.traceback,
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

    def _idle(self, metrics: dict[str, float]) -> dict[str, float]:
        """Idle fraction by role: the trainer's own metric, and the mean over rollout replicas."""
        idle = {"policy": metrics["idle_fraction"]} if "idle_fraction" in metrics else {}
        rollouts = [replica for replica in self._job.registry if replica.role == "rollout"]
        present = [replica for replica in rollouts if replica.present] or rollouts
        gauges = [r.gauges["idle_fraction"] for r in present if "idle_fraction" in r.gauges]
        if gauges:
            idle["rollout"] = fmean(gauges)
        return idle

    def ledger(self) -> m.LedgerStatus:
        """Counters of the ledger; of a supervised job all are zero."""
        if self._job.ledger is None:
            return m.LedgerStatus(created=0, states={}, dropped={}, staleness={}, max_staleness=0, bound=0)
        return self._job.ledger.status()

    def replicas(self) -> list[m.ReplicaInfo]:
        """All replicas that ever registered, by name."""
        job, now = self._job, self._job.clock()
        leased = [] if job.ledger is None else job.ledger.in_state(State.LEASED)
        leases = Counter([group.replica_id for group in leased])
        ordered: Iterable[Replica] = sorted(job.registry, key=lambda replica: replica.name)
        validating = job.validation
        return [
            replica.info(
                leases[replica.replica_id]
                + (0 if validating is None else validating.leases_of(replica.replica_id)),
                now,
            )
            for replica in ordered
        ]

    def groups(self, state: State | None, offset: int, limit: int) -> list[Group]:
        """Groups in the order of the stream."""
        ledger = self._job.require_ledger()
        if state is None:
            return ledger.in_order(offset, limit)
        if state in (State.TRAINED, State.DURABLE, State.DROPPED):
            return [group for group in ledger.in_order(0, ledger.frontier) if group.state is state][
                offset : offset + limit
            ]
        chosen = ledger.in_state(state)
        ordered = sorted(chosen, key=lambda group: (group.epoch, group.position))
        return ordered[offset : offset + limit]

    def group(self, name: str) -> Group:
        """One group. Raises `ProblemError` (404)."""
        group = self._job.require_ledger().find(name)
        if group is None:
            raise ProblemError(ErrorCode.NOT_FOUND, f"there is no group {name}")
        return group

    async def sample(self, name: str, index: int) -> bytes:
        """The frame of one sample. Raises `ProblemError` (404) when it is not kept (any more)."""
        group = self.group(name)
        if index not in group.samples:
            raise ProblemError(ErrorCode.NOT_FOUND, f"group {name} has no sample {index}")
        meta = group.samples[index]
        (part,) = await self._job.store.get_payloads([(name, meta.part)])
        if part is None:
            detail = f"the payload of sample {name}/{index} is not kept: the group is {group.state}"
            raise ProblemError(ErrorCode.NOT_FOUND, detail)
        frame = part[meta.offset : meta.offset + meta.n_bytes]
        files = self._job.payload_files
        return bytes(await asyncio.to_thread(resolve, None if files is None else files.root, frame))
