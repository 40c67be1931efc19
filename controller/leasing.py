"""What rollout replicas do: lease groups, push samples, give leases back.

A lease request is answered by the first of these that applies:

    finished | draining | paused | update (its weights are not part of this run any more) |
    groups of the validation round | update (the last round waits for newer weights) |
    groups to train on, or the ledger's refusal: throttled, or update where newer weights would help

`throttled` and `paused` are held open for `wait_s`, all others are answered at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from controller.groups import Group, State
from controller.job import Job
from controller.ledger import PushOutcome
from controller.replicas import ReplicaError
from controller.store import PayloadKey
from controller.store.payloads import Payload
from controller.validation import PREFIX
from controller.validation_groups import ValidationLease
from schema.wire.frame import FrameError
from schema.wire.messages import (
    ErrorCode,
    LeasedGroup,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    PushItem,
    PushReply,
    PushResult,
)
from schema.wire.sample import SampleHeader, read_sample_header
from schema.wire.seeds import sample_seed

log = logging.getLogger(__name__)

HELD_OPEN = frozenset({LeaseStatus.THROTTLED, LeaseStatus.PAUSED})


@dataclass(frozen=True, slots=True)
class Push:
    """One sample as it arrived."""

    item: PushItem
    frame: Payload


class Leasing:
    """The calls of rollout replicas."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._n_samples = job.config.rollout.n_generation
        self._sampling_seed = job.config.sampling_seed
        self._max_tokens = job.config.policy.model_max_length
        self._open: dict[str, object] = {}
        """The newest call of each request id that is under way."""

    # ---- lease --------------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Groups, or why not. Raises `ReplicaError`."""
        job, loop = self._job, asyncio.get_running_loop()
        give_up = loop.time() + request.wait_s
        me = self._open[request.request_id] = object()
        try:
            while True:
                job.store.require()
                seen = job.lease_signal.generation
                reply = self._decide(request)
                await job.save()
                left = give_up - loop.time()
                if reply.status not in HELD_OPEN or left <= 0 or job.closing:
                    return reply
                await job.lease_signal.wait(seen, left)
                if self._open.get(request.request_id) is not me:
                    return reply  # asked again meanwhile: nobody listens here, a grant would lie idle
        finally:
            if self._open.get(request.request_id) is me:
                del self._open[request.request_id]

    def _decide(self, request: LeaseRequest) -> LeaseReply:
        job, now = self._job, self._job.clock()
        replica = job.registry.check(request.replica_id, request.incarnation, "rollout")
        job.registry.seen(replica, now)
        replica.version, replica.publication_id = request.version, request.publication_id
        if job.ended:
            return LeaseReply(status=LeaseStatus.FINISHED, reason=f"the job is {job.phase}")
        if replica.state == "draining":
            return LeaseReply(status=LeaseStatus.DRAINING, reason="this replica was asked to drain")
        if job.facts.paused:
            return LeaseReply(status=LeaseStatus.PAUSED, reason="the job is paused")
        newest = job.publications.newest
        if newest is None:
            return LeaseReply(status=LeaseStatus.THROTTLED, reason="no weights have been published yet")
        held = job.publications.valid(request.publication_id)
        if held is None or held.version != request.version:
            return _update(
                newest.id, "the weights in use are not part of this run: load the newest publication"
            )
        return self._validate(request, newest.id, now) or self._train(request, newest.id, newest.version, now)

    def _validate(self, request: LeaseRequest, newest_id: int, now: float) -> LeaseReply | None:
        job = self._job
        if job.validation is None or self._repeats_training(request):
            return None
        lease = job.validation.lease(
            request.replica_id,
            request.request_id,
            request.version,
            request.publication_id,
            request.max_groups,
            now,
        )
        if lease.groups:
            return self._granted(self._validation_groups(lease))
        if job.progress.finished and job.validation.wants(request.version):
            return _update(newest_id, "the last validation is of newer weights")
        return None

    def _repeats_training(self, request: LeaseRequest) -> bool:
        leased = self._job.require_ledger().in_state(State.LEASED)
        return any(
            group.request_id == request.request_id and group.replica_id == request.replica_id
            for group in leased
        )

    def _train(self, request: LeaseRequest, newest_id: int, newest_version: int, now: float) -> LeaseReply:
        job, ledger = self._job, self._job.require_ledger()
        if ledger.finished:
            return LeaseReply(
                status=LeaseStatus.THROTTLED, reason="training is done, the job is about to finish"
            )
        size = request.max_groups
        if request.publication_id < newest_id:
            size = min(size, job.config.grpo.outdated_rollout_fetch_batch_size)
            if size == 0:
                return _update(newest_id, "outdated_rollout_fetch_batch_size = 0: update before leasing")
        decision = ledger.lease(
            request.replica_id, request.request_id, request.version, newest_version, size, now
        )
        if decision.groups:
            return self._granted([self._training_group(group) for group in decision.groups])
        refusal = decision.refusal
        assert refusal is not None
        if refusal.update and request.publication_id < newest_id:
            return _update(newest_id, refusal.reason)
        return LeaseReply(status=LeaseStatus.THROTTLED, reason=refusal.reason)

    def _granted(self, groups: list[LeasedGroup]) -> LeaseReply:
        expires = self._job.config.controller.lease_timeout
        return LeaseReply.model_construct(
            status=LeaseStatus.GRANTED, groups=groups, expires_in_s=expires, reason="", update_to=None
        )

    def _training_group(self, group: Group) -> LeasedGroup:
        tokens, row = self._job.prompts.get(group.epoch, group.position)
        assert group.lease_id is not None
        return LeasedGroup.model_construct(  # our own values: checking thousands of token ids again is waste
            group_id=group.id,
            lease_id=group.lease_id,
            kind="train",
            epoch=group.epoch,
            position=group.position,
            attempt=group.attempt,
            prompt_token_ids=tokens,
            row=row,
            seeds=self._seeds("train", group.epoch, group.position, self._n_samples),
            done=sorted(group.samples),
            deadline=group.deadline,
            pinned_version=None,
        )

    def _validation_groups(self, lease: ValidationLease) -> list[LeasedGroup]:
        validation, prompts = self._job.validation, self._job.validation_prompts
        assert validation is not None
        assert prompts is not None
        groups = []
        for group in lease.groups:
            tokens, row = prompts.get(0, group.position)
            assert group.lease_id is not None
            groups.append(
                LeasedGroup.model_construct(
                    group_id=validation.group_name(group),
                    lease_id=group.lease_id,
                    kind="validation",
                    epoch=0,
                    position=group.position,
                    attempt=group.attempt,
                    prompt_token_ids=tokens,
                    row=row,
                    seeds=self._seeds("validation", 0, group.position, validation.params.n_samples),
                    done=sorted(group.samples),
                    deadline=lease.version,
                    pinned_version=lease.version,
                )
            )
        return groups

    def _seeds(self, kind: str, epoch: int, position: int, n: int) -> list[int]:
        return [sample_seed(self._sampling_seed, kind, epoch, position, index) for index in range(n)]

    async def release(self, lease_id: str) -> bool:
        """Give a lease back; what was pushed under it is kept for the next holder."""
        job = self._job
        job.store.require()
        released = job.require_ledger().release(lease_id)
        if not released and job.validation is not None:
            released = job.validation.release(lease_id)
        if released:
            job.lease_signal.notify()
        await job.save()
        return released

    # ---- push ---------------------------------------------------------------------------------------------

    async def push(self, replica_id: str, pushes: Sequence[Push]) -> PushReply:
        """Take samples; each gets a result of its own. Raises `ReplicaError`, `StoreUnavailable`."""
        job = self._job
        job.store.require()
        replica = job.registry.find(replica_id)
        if replica.role != "rollout":
            raise ReplicaError(ErrorCode.FORBIDDEN, f"replica {replica_id} is a {replica.role} replica")
        await job.store.payloads.prepare({(p.item.group_id, p.item.index): p.frame for p in pushes})
        now = job.clock()
        job.registry.seen(replica, now)
        before = self._counts()
        results: list[PushResult] = []
        puts: dict[PayloadKey, Payload] = {}
        for push in pushes:
            item = push.item
            outcome = self._take(push, puts, now)
            results.append(
                PushResult(
                    group_id=item.group_id,
                    index=item.index,
                    accepted=outcome.accepted,
                    duplicate=outcome.duplicate,
                    code=outcome.code,
                    detail=outcome.detail,
                )
            )
        if self._counts() != before:
            job.settle()
            job.lease_signal.notify()
            job.batch_signal.notify()
        await job.save(puts)
        return PushReply(results=results)

    def _counts(self) -> tuple[int, int, bool]:
        ledger, validation = self._job.require_ledger(), self._job.validation
        return ledger.outstanding, ledger.ready, validation is not None and validation.running

    def _take(self, push: Push, puts: dict[PayloadKey, Payload], now: float) -> PushOutcome:
        item = push.item
        try:
            header = read_sample_header(push.frame)
        except FrameError as error:
            return PushOutcome(False, code=ErrorCode.BAD_FRAME, detail=str(error))
        fault = self._fault(header)
        if fault is not None:
            return fault
        if header.total_tokens > self._max_tokens:
            header = header.model_copy(update={"finish_reason": "overlong"})
        ledger, validation = self._job.require_ledger(), self._job.validation
        if validation is not None and item.group_id.startswith(PREFIX):
            return validation.push(item.group_id, item.lease_id, item.index, header, now)
        outcome = ledger.push(item.group_id, item.lease_id, item.index, header, len(push.frame), now)
        if outcome.accepted and not outcome.duplicate:
            puts[item.group_id, item.index] = push.frame
        return outcome

    def _fault(self, header: SampleHeader) -> PushOutcome | None:
        """What is wrong with a sample whoever holds its lease."""
        published = self._job.publications.newest
        newest = -1 if published is None else published.version
        if header.newest_version > newest:
            detail = (
                f"tokens of version {header.newest_version}, but the newest published version is {newest}"
            )
            return PushOutcome(False, code=ErrorCode.FUTURE_VERSION, detail=detail)
        if header.oldest_version > header.newest_version or (
            header.response_tokens and header.oldest_version < 0
        ):
            detail = f"weight versions {header.oldest_version} to {header.newest_version} cannot be"
            return PushOutcome(False, code=ErrorCode.BAD_FRAME, detail=detail)
        if header.prompt_tokens + header.response_tokens > header.total_tokens:
            detail = (
                f"{header.prompt_tokens} prompt and {header.response_tokens} response tokens are more than "
                f"{header.total_tokens} in all"
            )
            return PushOutcome(False, code=ErrorCode.BAD_FRAME, detail=detail)
        if header.score is None and header.error is None:
            return PushOutcome(
                False, code=ErrorCode.BAD_FRAME, detail="the sample has neither score nor error"
            )
        return None


def _update(publication_id: int, reason: str) -> LeaseReply:
    return LeaseReply(status=LeaseStatus.UPDATE, update_to=publication_id, reason=reason)
