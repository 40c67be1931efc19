"""Replicas come, beat and go: what that means for their leases, the trainers' epoch and the timeline.

| event                                   | what follows                                                       |
|-----------------------------------------|--------------------------------------------------------------------|
| registration, same request id           | the same answer                                                    |
| registration of a rollout replica       | leases it declares are kept, others of its name are released       |
| registration of a policy replica        | new policy epoch; the batched step is ready again; if the weights  |
|                                         | it starts from lie behind the committed steps: rewind to them; if  |
|                                         | ahead (an empty store, a checkpoint of another run): the ledger    |
|                                         | begins anew from the checkpoint's snapshot                         |
| heartbeats missed, process exited, left | leases released; of a trainer: nothing until the next one registers|

Only a crash of the replica's own that was observed counts for the groups that it held (see
`controller.ledger.ledger`): silence, a kill, leaving and being superseded are pre-emptions.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Literal

from controller.errors import ApiError
from controller.ledger.rejoin import adopt
from controller.services.samples import SampleService
from controller.state.job import JobState
from controller.state.job_facts import TRAIN_DATA, JobFacts
from controller.state.replicas import MAX_ABSENT, Registered, Replica
from schema.config.secrets import cut
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, Phase
from schema.wire.messages.recovery import DeclaredLeases, DeclareLeases
from schema.wire.messages.time_share import TurnReply, TurnRequest

log = logging.getLogger(__name__)

Command = Literal["drain", "stop", "checkpoint", "anchor"]
NAMED = 5
"""Ranks that a refusal names."""
MOST_MEETINGS = 256
"""Starts of trainers of which the meeting point is remembered; the oldest are forgotten first."""
LOOK_S = 0.5
"""Seconds between two looks of a call that waits for devices: a replica that comes back from silence wakes nobody."""
ANCHOR_BEATS = 6
"""Heartbeats without a publication after which the trainer is asked for a full version that replicas wait for."""


class ReplicaService:
    """The calls of all replicas about themselves."""

    def __init__(self, job: JobState, samples: SampleService) -> None:
        self._job, self._samples = job, samples
        self._config = cut(job.config.to_dict())
        self._anchor_asked_at = 0.0
        self._meetings: dict[str, m.Meeting] = {}
        self._superseded: dict[str, tuple[int, list[str]]] = {}
        """By name, of the replica that was superseded last: its parent process, the groups that it held. A report of
        its crash may come later."""

    def infos(self, name: str = "") -> list[m.ReplicaInfo]:
        """All replicas that ever registered, by name; or the one of this name."""
        registry = self._job.registry
        if name:
            replicas = [] if (named := registry.by_name(name)) is None else [named]
        else:
            replicas = sorted(registry, key=lambda replica: replica.name)
        return [self._info(replica) for replica in replicas]

    def _info(self, replica: Replica) -> m.ReplicaInfo:
        job, now, name = self._job, self._job.clock(), replica.replica_id
        held = job.progress.held_by(name)
        work = sum(max(0.0, now - max(group.leased_at, job.opened_at)) for group in held)
        return replica.info(len(held) + job.validation.leases_of(name), work, now)

    # ---- register -----------------------------------------------------------------------------------------

    async def register(self, request: m.RegisterRequest, secret: str = "") -> m.RegisterReply:
        """Start a new incarnation of a replica. Raises `ApiError`."""
        job = self._job
        job.store.require()
        if job.facts.ended in (Phase.FAILED, Phase.STOPPED):
            why = f": {job.facts.last_error}" if job.facts.last_error else ""
            raise ApiError(ErrorCode.JOB_FAILED, f"the job is {job.facts.ended}{why}")
        now = job.clock()
        if request.role == "policy":
            # A trainer that died on its way out, or was thought to hang.
            if job.facts.ended is Phase.FINISHED:
                raise ApiError(ErrorCode.JOB_FINISHED, "the job has finished: nothing is left to train")
            self._check_resume(request)
        elif not job.config.generates:
            raise ApiError(ErrorCode.CONFLICT, "this is a supervised job: it takes no rollout replicas")
        registered, timeline = job.registry.register(request, now, secret), job.progress.timeline
        if not registered.repeated:
            self._welcome(request, registered, now)
        reply = self._reply(registered.replica)
        if reply.publication is not None and request.role == "rollout":
            job.registry.hand_out(registered.replica, reply.publication.id)
        await job.save_durably()  # others key by its id, policy epoch and timeline
        if job.progress.timeline != timeline:
            await self._samples.restore()
        return reply

    def _check_resume(self, request: m.RegisterRequest) -> None:
        """Steps that the store does not know of must be described by the checkpoint that contains them."""
        committed, step, snapshot = self._job.progress.committed, request.resume_step, request.snapshot
        if self._job.membership is not None and self._job.membership.members:
            return  # it has to load their weights
        if snapshot is not None and snapshot.committed_steps != step:
            raise ApiError(
                ErrorCode.BAD_REQUEST,
                f"snapshot.committed_steps = {snapshot.committed_steps}, but resume_step = {step}: they are of "
                f"different checkpoints",
            )
        if step is None or self._resumes_in(request):
            return
        if snapshot is None:
            raise ApiError(
                ErrorCode.CONFLICT,
                f"policy replica {request.name!r} starts from {step} committed steps, but this job has {committed}, "
                f"and it brings no snapshot of the ledger: its checkpoint is incomplete",
            )
        self._job.ledger.check_snapshot(snapshot)
        if snapshot.passes is not None:  # what may fail, before anything counts
            self._job.require_ledger().table.passes.load(snapshot.passes)

    def _resumes_in(self, request: m.RegisterRequest) -> bool:
        """Whether the ledger here contains the checkpoint that a trainer starts from."""
        progress, snapshot = self._job.progress, request.snapshot
        timeline = None if snapshot is None else snapshot.timeline
        return progress.lineage.contains(request.resume_step or 0, timeline, progress.committed)

    def _welcome(self, request: m.RegisterRequest, registered: Registered, now: float) -> None:
        job, replica = self._job, registered.replica
        log.info("%s replica %s registered (%s, pid %d)", replica.role, replica.replica_id, replica.host, replica.pid)
        if replica.role == "rollout":
            job.publications.heard(request.newest_publication)
            self.adopt(replica.replica_id, request.held_leases, now)
            if registered.superseded is not None:
                held = job.require_ledger().table.held_by(registered.superseded)
                if held:
                    self._superseded[replica.name] = registered.parent_pid, [group.id for group in held]
                if len(self._superseded) > MAX_ABSENT:
                    del self._superseded[next(iter(self._superseded))]
                self.release_all(registered.superseded, failed=False)
        else:
            self._trainer_comes(request, registered)
        self._check_assembled(job.facts)
        job.lease_signal.notify()
        job.turn_signal.notify()

    def adopt(self, replica_id: str, held: Sequence[m.HeldLease], now: float) -> list[str]:
        """Leases that a rollout replica says it holds become its own where possible; the ids of those that cannot.

        A forgotten lease is only taken back if the weights that it was granted for are of this timeline: nobody knows
        what its holder has loaded since, but it was of no other.
        """
        job = self._job
        table = job.require_ledger().table
        checked = []
        for lease in held:
            weights = job.publications.valid(lease.publication_id, lease.manifest_hash)
            of_now = weights is not None and (weights.timeline, weights.version) == (table.timeline, lease.version)
            usable = of_now and lease.manifest_hash
            checked.append(lease if usable else lease.model_copy(update={"version": -1}))
        lost = set(adopt(table, replica_id, checked, now))
        lost &= set(job.validation.adopt(replica_id, held, now))
        return [lease.lease_id for lease in held if lease.lease_id in lost]

    async def declare_leases(self, replica_id: str, request: DeclareLeases) -> DeclaredLeases:
        """Leases that a heartbeat called lost, as their holder knows them. Raises `ApiError`."""
        job = self._job
        job.acting(replica_id, request.incarnation, "rollout")
        lost = self.adopt(replica_id, request.leases, job.clock())
        if len(lost) < len(request.leases):
            log.info("replica %s keeps %d leases", replica_id, len(request.leases) - len(lost))
        await job.save()
        return DeclaredLeases(lost_leases=lost)

    def _trainer_comes(self, request: m.RegisterRequest, registered: Registered) -> None:
        """The first of several ones that says where it starts from begins an epoch; the others join it."""
        job, membership = self._job, self._job.membership
        if membership is None:
            self._new_policy_epoch(request)
            return
        if registered.superseded is not None:
            membership.gone(registered.superseded)
        if not membership.members and request.resume_step is not None:
            self._new_policy_epoch(request)
            membership.found(registered.replica.replica_id, request.resume_step)
        job.member_signal.notify()

    def _new_policy_epoch(self, request: m.RegisterRequest) -> None:
        job, step = self._job, request.resume_step
        job.facts.policy_epoch = max(job.facts.policy_epoch + 1, int(job.wall() * 1000))
        job.facts.exported = False
        job.scaling.trainer(job.clock(), "away")
        job.publications.heard(request.newest_publication)
        committed, known = job.progress.committed, self._resumes_in(request)
        job.progress.abandon_step()
        if step is not None and not known:
            log.warning(
                "of the %d steps that are known here the checkpoint of step %d is none: the ledger is taken from it",
                committed,
                step,
            )
            assert request.snapshot is not None
            job.begin_from(request.snapshot)
        elif step is not None and step < committed:
            log.warning("going back from %d committed steps to %d", committed, step)
            job.rewind(step)
        job.wake_all()

    def _check_assembled(self, facts: JobFacts) -> None:
        if not facts.assembled and not self.missing():
            facts.assembled = True

    def missing(self) -> dict[m.Role, int]:
        """How many of the first replicas of each role have not registered."""
        job = self._job
        wanted: dict[m.Role, int] = {"policy": job.config.policy.parallelism.n_init_replicas}
        if job.config.generates:
            wanted["rollout"] = job.config.rollout.parallelism.n_init_replicas
        known = list(job.registry)
        counts = {role: sum(replica.role == role for replica in known) for role in wanted}
        return {role: wanted[role] - counts[role] for role in wanted if counts[role] < wanted[role]}

    def _reply(self, replica: Replica) -> m.RegisterReply:
        job = self._job
        store = job.config.weight_sync.store
        return m.RegisterReply(
            replica_id=replica.replica_id,
            incarnation=replica.incarnation,
            job_id=job.job_id,
            config=self._config,
            job_seed=job.config.effective_seed,
            mode="grpo" if job.config.is_grpo else "sft",
            timeline=job.progress.timeline,
            timeline_began=job.progress.began,
            timeline_since=job.progress.lineage.since,
            committed_steps=job.progress.committed,
            total_steps=job.progress.total_steps,
            policy_epoch=job.facts.policy_epoch,
            heartbeat_interval=job.config.controller.heartbeat_interval,
            heartbeat_timeout=job.config.controller.heartbeat_timeout,
            run_dir=str(job.run_dir),
            weight_store=store or str(job.run_dir / "weights"),
            data_file=str(job.run_dir / TRAIN_DATA),
            rows_files=job.rows_files if replica.role == "rollout" else {},
            publication=job.publications.newest,
            members=0 if job.membership is None else len(job.membership.members),
        )

    # ---- beat ---------------------------------------------------------------------------------------------

    async def heartbeat(self, replica_id: str, request: m.HeartbeatRequest) -> m.HeartbeatReply:
        """Renew leases and hand out commands. Raises `ApiError`."""
        job = self._job
        job.store.require()
        now = job.clock()
        replica = job.registry.check(replica_id, request.incarnation)
        news = job.registry.beat(replica, now, request)
        lost = self._renew(replica, request.leases, now) if replica.role == "rollout" and news else []
        if request.trouble and news:
            job.facts.last_error = request.trouble
        reply = m.HeartbeatReply(
            commands=self._commands(replica),
            lost_leases=lost,
            newest_publication=job.publications.newest_id,
            committed_steps=job.progress.committed,
            phase=job.phase,
            profile=replica.profile_order,
            members_epoch=0 if job.membership is None else job.membership.epoch,
        )
        await job.save()
        return reply

    def _renew(self, replica: Replica, leases: list[str], now: float) -> list[str]:
        job = self._job
        outstanding = job.progress.outstanding
        lost = set(job.require_ledger().renew(replica.replica_id, leases, now))
        lost &= set(job.validation.renew(replica.replica_id, leases, now))
        if job.progress.outstanding != outstanding:
            job.lease_signal.notify()
        return sorted(lost)

    def _commands(self, replica: Replica) -> list[Command]:
        job = self._job
        commands: list[Command] = []
        if replica.state == "draining":
            commands.append("drain")
        if job.facts.ended in (Phase.STOPPED, Phase.FAILED):
            commands.append("stop")
        leads = replica.role == "policy" and job.leads(replica.replica_id)
        if leads and job.checkpoint_asked:
            job.checkpoint_asked = False
            commands.append("checkpoint")
        if leads and self._anchor_is_overdue():
            commands.append("anchor")
        return commands

    def _anchor_is_overdue(self) -> bool:
        """Whether a replica waits for a full version and the trainer, which learns of it when it publishes, does not.

        It may be waiting for the very replicas that cannot read what there is.
        """
        job, now = self._job, self._job.clock()
        last = max(job.published_at, self._anchor_asked_at)
        patience = ANCHOR_BEATS * job.config.controller.heartbeat_interval
        if not job.facts.anchor_wanted or now - last < patience:
            return False
        self._anchor_asked_at = now
        return True

    # ---- turns on devices in common ---------------------------------------------------------------------------

    async def turn(self, replica_id: str, request: TurnRequest) -> TurnReply:
        """Whether the devices are the caller's: answered when it has to do something, or after `wait_s`.

        Raises `ApiError`, `StoreUnavailable`.
        """
        job, loop, time_share = self._job, asyncio.get_running_loop(), self._job.time_share
        if not job.config.shares_time:
            detail = f'there are no turns: placement.share = "{job.config.placement.share}"'
            raise ApiError(ErrorCode.CONFLICT, detail)
        give_up = loop.time() + request.wait_s
        role = job.registry.find(replica_id).role
        self._hear_time_share(job.acting(replica_id, request.incarnation, role), request)
        await job.save()
        while True:
            job.store.require()
            job.registry.check(replica_id, request.incarnation)
            seen, yours = job.turn_signal.generation, self._may_have(role, request.holds)
            left = give_up - loop.time()
            as_it_is = request.holds if role == "rollout" else False
            if yours != as_it_is or left <= 0 or job.closing or time_share.is_old(replica_id, request.sequence):
                if role == "rollout" and yours:
                    time_share.wakes(replica_id)
                return TurnReply(yours=yours)
            await job.turn_signal.wait(seen, min(left, LOOK_S))

    def _hear_time_share(self, replica: Replica, request: TurnRequest) -> None:
        job, time_share = self._job, self._job.time_share
        time_share.forget([known.replica_id for known in job.registry])
        if not time_share.hears(replica.replica_id, request.sequence):
            return
        if replica.role == "policy":
            time_share.given = 0 if request.holds else job.facts.policy_epoch
            job.lease_signal.notify()
        elif request.holds:
            time_share.wakes(replica.replica_id)
        else:
            time_share.sleeps(replica.replica_id)
        job.turn_signal.notify()

    def _may_have(self, role: m.Role, holds: bool) -> bool:
        """A trainer: what it asks for, once no rollout replica holds any."""
        job = self._job
        if role == "rollout":
            return not job.trainer_has_devices
        return holds and not job.time_share.awake([rollout.replica_id for rollout in job.registry.present("rollout")])

    # ---- profile ------------------------------------------------------------------------------------------

    async def profile(self, replica_id: str, request: m.ProfileRequest) -> m.ProfileStatus:
        """Ask a trainer for a profile; durable when answered. Raises `ApiError`."""
        job = self._job
        job.store.require()
        replica = job.registry.find(replica_id)
        known = replica.profile_status
        if known is not None and known.profile_id == request.request_id:
            return known
        self._check_profile(replica, request)
        settings = job.config.profiler.sub_profiler_config
        order = m.ProfileOrder(
            profile_id=request.request_id or uuid.uuid4().hex,
            first_step=request.first_step,
            steps=request.steps or settings.active_steps,
            warmup=settings.warmup_steps if request.warmup is None else request.warmup,
            ranks=sorted(set(request.ranks or settings.rank_filter)) or list(range(replica.world_size)),
        )
        job.registry.ask_profile(replica, order)
        await job.save_durably()
        status = replica.profile_status
        assert status is not None
        return status

    def _check_profile(self, replica: Replica, request: m.ProfileRequest) -> None:
        """Raises `ApiError` for what no trainer of this job can record."""
        job, name, first = self._job, replica.name, request.first_step
        if replica.role != "policy":
            detail = f"{name} is a {replica.role} replica: profiles are of policy replicas"
            raise ApiError(ErrorCode.CONFLICT, detail)
        if not job.config.profiler.enable_profiler:
            detail = (
                "profiler.enable_profiler = false: this job takes no profiles; stop it and go on with cosmos-launch "
                f"--resume {job.run_dir} --set profiler.enable_profiler=true"
            )
            raise ApiError(ErrorCode.CONFLICT, detail)
        if job.ended or job.progress.finished:
            raise ApiError(ErrorCode.CONFLICT, f"the job is {job.phase}: no step is left to record")
        if not replica.present:
            detail = f"{name} has state {replica.state}: ask again when a trainer is there"
            raise ApiError(ErrorCode.CONFLICT, detail)
        if absent := sorted(rank for rank in set(request.ranks) if rank >= replica.world_size):
            ranks = f"0 to {replica.world_size - 1}" if replica.world_size > 1 else "0 alone"
            detail = f"{name} has no rank {', '.join(map(str, absent[:NAMED]))}: its ranks are {ranks}"
            raise ApiError(ErrorCode.BAD_REQUEST, detail)
        if first is not None and first < job.progress.committed:
            detail = f"step {first} is trained already: the job is at step {job.progress.committed}"
            raise ApiError(ErrorCode.BAD_REQUEST, detail)
        if first is not None and first >= job.progress.total_steps:
            detail = f"step {first} does not exist: the last one of this job is {job.progress.total_steps - 1}"
            raise ApiError(ErrorCode.BAD_REQUEST, detail)

    # ---- go -----------------------------------------------------------------------------------------------

    async def drain(self, replica_id: str) -> m.DrainReply:
        """Ask a replica to finish what it holds and leave; durable when answered."""
        self._job.store.require()
        replica = self._job.registry.find(replica_id)
        self._job.registry.drain(replica)
        self._job.lease_signal.notify()
        await self._job.save_durably()
        return m.DrainReply(replica_id=replica_id, draining=replica.state == "draining")

    async def leave(self, replica_id: str, incarnation: int, reason: str) -> None:
        """A replica leaves in order: what it holds is released and does not count as a failure."""
        job = self._job
        job.store.require()
        replica = job.registry.find(replica_id)
        if replica.state != "left":
            job.registry.check(replica_id, incarnation)
            led = job.leads(replica_id)
            job.registry.leave(replica, reason)
            log.info("%s replica %s left: %s", replica.role, replica_id, reason or "no reason given")
            self._gone(replica, failed=False)
            if replica.role == "policy" and led and reason == "finished" and job.progress.finished:
                job.facts.exported = True
            job.settle()
        if replica.role == "policy":  # no process would be left to report again that it has finished
            await job.save_durably()
        else:
            await job.save()

    async def exited(self, name: str, reason: str, *, crashed: bool, parent_pid: int = 0) -> None:
        """The launcher saw the process of a replica end. `crashed`: by itself, it was not killed.

        parent_pid: of the process that ended; 0: that of the present incarnation.
        """
        job = self._job
        job.store.require()
        replica = job.registry.by_name(name)
        if replica is None:
            raise ApiError(ErrorCode.UNKNOWN_REPLICA, f"no replica named {name!r} has registered")
        if parent_pid and replica.parent_pid not in (0, parent_pid):
            parent, held = self._superseded.get(name, (0, []))
            if parent == parent_pid:
                del self._superseded[name]
                if crashed:
                    job.require_ledger().blame(held)
        elif replica.present:
            log.warning("the process of %s replica %s ended: %s", replica.role, replica.replica_id, reason)
            job.registry.gone(replica, reason)
            self._gone(replica, failed=crashed)
        await job.save()

    def lose_silent(self, now: float) -> None:
        """Replicas that missed their heartbeats are lost."""
        for replica in self._job.registry.expire(now):
            log.warning("%s replica %s missed its heartbeats: it counts as lost", replica.role, replica.replica_id)
            self._gone(replica, failed=False)

    def _gone(self, replica: Replica, *, failed: bool) -> None:
        self._job.turn_signal.notify()
        self._job.lease_signal.notify()
        if replica.role == "rollout":
            self.release_all(replica.replica_id, failed=failed)
            return
        membership = self._job.membership
        if membership is not None:
            membership.gone(replica.replica_id)
            self._job.member_signal.notify()
        if membership is None or not membership.members:
            self._job.scaling.trainer(self._job.clock(), "away")

    def release_all(self, replica_id: str, *, failed: bool) -> None:
        """Give all leases of a replica to others."""
        job = self._job
        job.require_ledger().replica_gone(replica_id, failed=failed)
        job.validation.replica_gone(replica_id, job.wall(), failed=failed)
        job.lease_signal.notify()
        job.batch_signal.notify()

    # ---- ranks of a trainer that look for each other ------------------------------------------------------

    def announce(self, meeting_id: str, meeting: m.Meeting) -> None:
        """Keep where a replica's ranks meet at one start of it, in memory alone: rank 0 says it again and again until
        all have come, to a controller that was restarted meanwhile too."""
        if meeting_id not in self._meetings and len(self._meetings) >= MOST_MEETINGS:
            del self._meetings[next(iter(self._meetings))]
        self._meetings[meeting_id] = meeting
        self._job.batch_signal.notify()

    async def meeting(self, meeting_id: str, wait_s: float) -> m.Meeting | None:
        """Where they meet, or None when the wait is over and rank 0 has not come."""
        job, loop = self._job, asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        while True:
            seen, left = job.batch_signal.generation, give_up - loop.time()
            meeting = self._meetings.get(meeting_id)
            if meeting is not None or left <= 0 or job.closing:
                return meeting
            await job.batch_signal.wait(seen, left)
