"""The calls of policy replicas that train together (see `controller.state.membership`).

Each call is a long-poll: it is answered when there is something to do. A decision is stored before it is answered,
so that a successor of this controller decides nothing else. Where the store has lost decisions, the calls prove them,
and a replica that knows of commits which the store has lost is asked to declare itself.
"""

from __future__ import annotations

import asyncio
import logging

from controller.errors import ApiError
from controller.state.job import JobState
from controller.state.membership import MemberOrder, Membership
from schema.wire.batch import batch_digest
from schema.wire.messages import ErrorCode, Phase
from schema.wire.messages.members import MemberReply, MemberRequest

log = logging.getLogger(__name__)


class MemberService:
    """See the module's docstring."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._asked: tuple[int, float] = (-1, 0.0)
        """The step at whose beginning others wait for those who load, and since when."""

    def tick(self, now: float) -> None:
        """Go on without replicas that take too long to load the others' weights: they join at another step. Begin
        a membership epoch where all wait for each other."""
        membership = self._job.membership
        if membership is None:
            return
        self._end_standstill(membership, now)
        if not any(membership.waiting.values()):
            return
        if self._asked[0] != membership.step:
            self._asked = membership.step, now
        elif now - self._asked[1] > (limit := self._job.config.controller.start_timeout):
            late = ", ".join(membership.give_up())
            log.warning("training goes on without %s, which did not load within %g s", late, limit)
            self._job.member_signal.notify()

    def _end_standstill(self, membership: Membership, now: float) -> None:
        job = self._job
        job.standstill.at(membership.step)
        limit = job.standstill.limit
        if job.ended or job.progress.finished or not job.standstill.is_over(membership.expected, now):
            return
        behind = membership.begin_anew()
        left = f"; {', '.join(behind)} begin anew" if behind else ""
        job.say_members(f"all policy replicas waited for each other for {limit:g} s{left}: ")
        log.warning("policy replicas waited for each other for %g s: they begin the round anew%s", limit, left)
        job.member_signal.notify()

    async def ask(self, replica_id: str, request: MemberRequest) -> MemberReply:
        """Return what the replica is to do; `wait` after `wait_s` seconds in which there was nothing.

        Raises:
            ApiError: it cannot take part.
        """
        job, loop = self._job, asyncio.get_running_loop()
        membership = job.membership
        if membership is None:
            detail = "policy.parallelism.n_init_replicas = 1: there is one trainer, and nobody to train with"
            raise ApiError(ErrorCode.CONFLICT, detail)
        give_up = loop.time() + request.wait_s
        while True:
            job.acting(replica_id, request.incarnation, "policy")
            if job.facts.ended in (Phase.FAILED, Phase.STOPPED):
                raise ApiError(ErrorCode.JOB_FAILED, f"the job is {job.facts.ended}: {job.facts.last_error or ''}")
            seen = job.member_signal.generation
            order = self._decide(membership, replica_id, request)
            if order.action != "wait":
                job.member_signal.notify()
            left = give_up - loop.time()
            waits = order.action == "wait"
            job.standstill.heard(replica_id, job.clock(), waits=waits, for_s=max(left, 0.0))
            await job.save()
            left = give_up - loop.time()
            over = job.progress.finished and request.at == "begin"  # who follows need not wait for the leader
            if order.action != "wait" or left <= 0 or over or job.closing:
                return self._reply(membership, replica_id, order)
            await job.member_signal.wait(seen, left)

    def _decide(self, membership: Membership, name: str, request: MemberRequest) -> MemberOrder:
        at, step, number = request.at, request.step, request.number
        self._check_history(membership, request)
        if request.policy_epoch != self._job.facts.policy_epoch:
            return MemberOrder("heal", membership.epoch)
        membership.follow(self._job.progress.committed)
        membership.lead(name, request.leads)
        if at == "join":
            self._check_kind(membership, name, request.kind)
            return membership.join(name, step, request.weights)
        if at == "healed":
            return membership.healed(name, step, request.weights)
        if at == "begin":
            if request.kind and name in membership.members:  # it was forgotten with the history of the store
                membership.kind = dict(request.kind)
            return membership.begin(name, step, request.weights, request.applied)
        if at == "saved":
            membership.save(step)
            self._job.member_signal.notify()  # replicas that wait can load it
            return membership.begin(name, step, request.weights, request.applied)
        if number == 0 and membership.begins(step) and self._is_another(step, request.batch):
            return MemberOrder("batch", membership.epoch)
        weights, applied = request.weights, request.applied
        if at == "holds":
            return membership.holds(name, request.epoch, step, number, weights=weights, applied=applied)
        if at == "broken":
            membership.broken(name, request.epoch)
        seconds = request.seconds
        return membership.ready(name, request.epoch, step, number, seconds, weights=weights, applied=applied)

    def _check_history(self, membership: Membership, request: MemberRequest) -> None:
        """Raises `ApiError`: the store has lost what the replica knows of, so that it has to declare itself."""
        current, at = self._job.facts.policy_epoch, request.at
        if request.policy_epoch > current:
            detail = f"policy epoch {request.policy_epoch} is not known here, {current} is: declare yourself first"
            raise ApiError(ErrorCode.STALE_EPOCH, detail)
        if request.policy_epoch < current or at in ("join", "healed"):
            return
        if membership.forgot(request.step, begins=at in ("begin", "saved")):
            detail = f"step {membership.step} is the present one here, not {request.step}: declare yourself first"
            raise ApiError(ErrorCode.WRONG_STEP, detail)

    def _check_kind(self, membership: Membership, name: str, kind: dict[str, str]) -> None:
        """Raises `ApiError`: it is of another kind than the members."""
        known = membership.kind
        if name in membership.members:
            membership.kind = dict(kind)
        elif known and known != kind:
            names = sorted(name for name in {*known, *kind} if known.get(name) != kind.get(name))
            faults = "; ".join(f"{name}: {kind.get(name, 'none')}, not {known.get(name, 'none')}" for name in names)
            detail = f"{name} cannot train with {membership.leader}, it is of another kind: {faults}"
            log.error("%s", detail)
            self._job.facts.last_error = detail
            raise ApiError(ErrorCode.CONFLICT, detail)

    def _is_another(self, step: int, digest: str) -> bool:
        """Whether the batch that it trains on is not the one of the step: payloads of it were lost meanwhile."""
        job = self._job
        if not job.config.is_grpo or not digest:
            return False
        names = [group.id for group in job.ledger.batch(step) or []]
        return batch_digest(job.progress.timeline, step, names) != digest

    def _reply(self, membership: Membership, name: str, order: MemberOrder) -> MemberReply:
        job, leads = self._job, membership.leader == name
        return MemberReply(
            action=order.action,
            epoch=order.epoch,
            parts=list(order.parts),
            members=list(order.members),
            counts=list(order.counts),
            step=order.step,
            leads=leads,
            committed=job.commit_reply(publish=job.is_published(job.progress.committed)),
            publication=job.publications.newest if leads else None,
        )
