"""What rollout replicas do: lease groups, push samples, give leases back.

A lease request is answered by the first of these that applies:

    finished | draining | paused (by a user, or during an outage of rewards: see `controller.ledger.reward_health`) |
    update (its weights are not part of this run any more) |
    groups of the validation round | update (the last round waits for newer weights) |
    groups to train on, or the ledger's refusal: throttled, or update where newer weights would help

`throttled` and `paused` are held open for `wait_s`, all others are answered at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from controller.ledger.group import Group, State
from controller.ledger.ledger import PushOutcome
from controller.services.lease_queue import HELD_OPEN, LeaseQueue
from controller.services.payload_parts import Parts, Push
from controller.state.job import Job
from controller.state.replicas import ReplicaError
from controller.state.validation import PREFIX
from controller.state.validation_group import ValidationLease
from controller.store.payloads import Payload
from schema.wire.frame import FrameError
from schema.wire.messages import (
    ErrorCode,
    LeasedGroup,
    LeaseReply,
    LeaseRequest,
    LeaseStatus,
    Phase,
    PushItem,
    PushReply,
    PushResult,
)
from schema.wire.payload_file import FileEntry, entry_of, read_entry
from schema.wire.sample import SampleHeader, read_sample_metadata, sample_seed

log = logging.getLogger(__name__)

MAX_HEADER_TEXT = 1024
"""A sample's header is kept as the text it came as, unless that is longer: spaces cost memory, too."""
REMEMBERED = 8192
"""Granted request ids that are remembered: several minutes of a thousand replicas."""


class Leasing:
    """The calls of rollout replicas."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._n_samples = job.config.rollout.n_generation
        self._sampling_seed = job.config.sampling_seed
        self._max_tokens = job.config.policy.model_max_length
        config = job.config
        self._scored_alike = config.is_grpo and set(config.validation_reward_weights) == set(
            config.grpo.reward_weights
        )
        """Whether validation is scored with the functions of training: what fails there fails here."""
        self._answered: dict[str, None] = {}
        """Request ids that were granted groups, the oldest first: a late duplicate gets no others."""
        self._waiting = LeaseQueue(
            job.lease_signal, self._decide_later, self._alike, job.stage, lambda: job.closing
        )

    # ---- lease --------------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Groups, or why not. Raises `ReplicaError`, `StoreUnavailable`."""
        reply = await self.lease_now(request)
        return await self.lease_later(request, reply) if self.may_wait(request, reply) else reply

    async def lease_now(self, request: LeaseRequest) -> LeaseReply:
        """The answer of this moment. Raises as `lease`."""
        job = self._job
        job.store.require()
        replica = job.registry.check(request.replica_id, request.incarnation, "rollout")
        job.registry.seen(replica, job.clock())
        self._waiting.withdraw(request.request_id)
        self._waiting.catch_up()
        reply = self._decide(request)
        await job.save()
        return reply

    def may_wait(self, request: LeaseRequest, reply: LeaseReply) -> bool:
        """Whether a refused request is held open."""
        return request.wait_s > 0 and reply.status in HELD_OPEN and not self._job.closing

    async def lease_later(self, request: LeaseRequest, refusal: LeaseReply) -> LeaseReply:
        """The answer to a request that has just been refused, as soon as there is a better one. Raises as `lease`."""
        reply = await self._waiting.wait(request, refusal, request.wait_s)
        await self._job.save()
        return reply

    def _alike(self) -> bool:
        """Whether a refusal holds for all replicas with the same weights, whoever they are."""
        job, ledger = self._job, self._job.require_ledger()
        if ledger.has_suspects or job.ended or (job.validation is not None and job.validation.pending):
            return False
        return not any(replica.state == "draining" for replica in job.registry)

    def _decide_later(self, request: LeaseRequest) -> LeaseReply | None:
        """The answer to a request that waits; None if its replica was lost meanwhile: nobody may be listening."""
        replica = self._job.registry.check(request.replica_id, request.incarnation, "rollout")
        return None if replica.state == "lost" else self._decide(request)

    def _decide(self, request: LeaseRequest) -> LeaseReply:
        job, now = self._job, self._job.clock()
        job.store.require()
        replica = job.registry.check(request.replica_id, request.incarnation, "rollout")
        if request.publication_id >= replica.publication_id:  # else this request is late
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
        held = job.publications.valid(request.publication_id, request.manifest_hash)
        if held is None and not job.publications.knows(request.publication_id):  # the store has lost it
            job.publications.heard(request.publication_id)
            return LeaseReply(
                status=LeaseStatus.THROTTLED,
                reason=f"publication {request.publication_id} is not known here: waiting for its trainer, or a newer "
                f"one, to say what it is",
            )
        if held is None or held.version != request.version:
            return _update(
                newest.id, "the weights in use are not part of this run: load the newest publication"
            )
        if request.request_id in self._answered and not self._repeats(request):
            return LeaseReply(
                status=LeaseStatus.THROTTLED,
                reason="this request was granted before, and what it got is done",
            )
        if job.rewards.outage is not None and not self._repeats(request):
            return self._probe(request, newest.id, newest.version, now)
        return self._validate(request, newest.id, now) or self._train(request, newest.id, newest.version, now)

    def _probe(self, request: LeaseRequest, newest_id: int, newest_version: int, now: float) -> LeaseReply:
        """During an outage of rewards: one group at a time, for all replicas together."""
        rewards, one = self._job.rewards, request.model_copy(update={"max_groups": 1})
        if not self._scored_alike and (reply := self._validate(request, newest_id, now)) is not None:
            return reply
        if rewards.probe is not None and not self._is_leased(*rewards.probe):
            rewards.probe = None  # its holder has gone
        if not rewards.may_probe(now):
            return LeaseReply(status=LeaseStatus.PAUSED, reason=rewards.note)
        reply = self._validate(one, newest_id, now) or self._train(one, newest_id, newest_version, now)
        if reply.groups:
            rewards.probe = reply.groups[0].group_id, reply.groups[0].lease_id
        return reply

    def _is_leased(self, name: str, lease_id: str) -> bool:
        ledger, validation = self._job.require_ledger(), self._job.validation
        if validation is not None and (group := validation.find(name)) is not None:
            return group.lease_id == lease_id
        return name in ledger.groups and ledger.groups[name].lease_id == lease_id

    def _repeats(self, request: LeaseRequest) -> bool:
        validation = self._job.validation
        if validation is not None and validation.repeats(request.replica_id, request.request_id):
            return True
        return self._repeats_training(request)

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
            return self._granted(request, self._validation_groups(lease))
        if job.progress.finished and job.validation.wants(request.version):
            return _update(newest_id, "the last validation is of newer weights")
        return None

    def _repeats_training(self, request: LeaseRequest) -> bool:
        held = self._job.require_ledger().held_by(request.replica_id)
        return any(group.request_id == request.request_id for group in held)

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
            request.replica_id,
            request.request_id,
            request.version,
            newest_version,
            size,
            now,
            probe=job.rewards.outage is not None,
        )
        if decision.groups:
            return self._granted(request, [self._training_group(group) for group in decision.groups])
        refusal = decision.refusal
        assert refusal is not None
        if refusal.update and request.publication_id < newest_id:
            return _update(newest_id, refusal.reason)
        return LeaseReply(status=LeaseStatus.THROTTLED, reason=refusal.reason)

    def _granted(self, request: LeaseRequest, groups: list[LeasedGroup]) -> LeaseReply:
        self._answered[request.request_id] = None
        if len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
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

    def holder(self, lease_id: str) -> str | None:
        """Id of the replica that holds a lease, if anybody does."""
        job = self._job
        held = job.require_ledger().holder(lease_id)
        return job.validation.holder(lease_id) if held is None and job.validation is not None else held

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

    async def push(self, replica_id: str, body: Payload, pushes: Sequence[Push]) -> PushReply:
        """Take samples that lie in `body`; each gets a result of its own.

        Raises:
            ReplicaError, StoreUnavailable: nothing was taken.
        """
        job = self._job
        missing = await self._missing_files(pushes)  # first of all: no await may lie between the others
        job.store.require()
        job.require_room()
        replica, now = job.registry.find(replica_id), job.clock()
        if replica.role != "rollout":
            raise ReplicaError(ErrorCode.FORBIDDEN, f"replica {replica_id} is a {replica.role} replica")
        job.registry.seen(replica, now)
        before = self._counts()
        results: list[PushResult] = []
        parts = Parts(body)
        for push in pushes:
            item = push.item
            outcome = self._take(push, parts, missing, now)
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
        await job.save(parts.finish())
        return PushReply(results=results)

    def _counts(self) -> tuple[int, int, bool]:
        ledger, validation = self._job.require_ledger(), self._job.validation
        return ledger.outstanding, ledger.ready, validation is not None and validation.running

    def _take(self, push: Push, parts: Parts, missing: set[str], now: float) -> PushOutcome:
        item = push.item
        try:
            header, metadata = read_sample_metadata(push.frame)
            stub = entry_of(metadata)
        except FrameError as error:
            return PushOutcome(False, code=ErrorCode.BAD_FRAME, detail=str(error))
        fault = self._fault(header) or self._stub_fault(item, stub, missing)
        if fault is not None:
            return fault
        text = metadata["sample"]
        if header.total_tokens > self._max_tokens:
            header = header.model_copy(update={"finish_reason": "overlong"})
            text = ""
        if not 0 < len(text) <= MAX_HEADER_TEXT:
            text = header.model_dump_json()
        ledger, validation = self._job.require_ledger(), self._job.validation
        outage = self._job.rewards.outage is not None
        if validation is not None and item.group_id.startswith(PREFIX):
            at = self._job.wall()
            outcome = validation.push(item.group_id, item.lease_id, item.index, header, at, outage=outage)
            if self._scored_alike:
                self._judge_rewards(item, outcome, now)
            return outcome
        first, offset = parts.place(push)
        outcome = ledger.push(
            item.group_id,
            item.lease_id,
            item.index,
            header,
            len(push.frame),
            now,
            first=first,
            offset=offset,
            text=text,
            outage=outage,
        )
        self._judge_rewards(item, outcome, now)
        if outcome.accepted and not outcome.duplicate:
            parts.add(push)
            if header.error is not None:
                self._tell_if_dropped(item.group_id)
        return outcome

    def _judge_rewards(self, item: PushItem, outcome: PushOutcome, now: float) -> None:
        """What the end of an attempt says about the rewards."""
        if not outcome.complete:
            return
        job, rewards = self._job, self._job.rewards
        before = rewards.outage
        stop = rewards.observe(item.group_id, item.lease_id, outcome.failure, now)
        if (before is None) != (rewards.outage is None):
            log.warning("%s", rewards.note or "rewards are scored again: prompts are handed out as before")
            job.lease_signal.notify()
        if stop is not None:
            job.end(Phase.FAILED, stop.reason, stop.traceback)

    def _tell_if_dropped(self, name: str) -> None:
        """A failed reward that costs a prompt must be seen; one that is tried again need not."""
        group = self._job.require_ledger().groups.get(name)
        if group is not None and group.state is State.DROPPED:
            log.warning("group %s is dropped (%s): %s", name, group.reason, group.error)

    async def _missing_files(self, pushes: Sequence[Push]) -> set[str]:
        """Files that stubs among the samples name and that are not there."""
        files = self._job.payload_files
        if files is None:
            return set()
        entries: list[FileEntry] = []
        for push in pushes:
            with suppress(FrameError):  # said when its turn comes
                entry = read_entry(push.frame)
                if entry is not None:
                    entries.append(entry)
        return await files.missing(entries)

    def _stub_fault(self, item: PushItem, stub: FileEntry | None, missing: set[str]) -> PushOutcome | None:
        """What is wrong with the stub of a payload that lies in a file."""
        if stub is None:
            return None
        if self._job.payload_files is None:
            detail = "the payload is said to lie in a file, but controller.payload_store is empty"
        elif stub.name != f"{item.group_id}.{item.lease_id}.{item.index}":
            detail = f"the payload's file {stub.name!r} is not that of this sample"
        elif stub.name in missing:
            detail = (
                f"the payload's file {self._job.payload_files.root / stub.name} is not there: "
                f"controller.payload_store must be the same directory for all"
            )
        else:
            return None
        return PushOutcome(False, code=ErrorCode.BAD_FRAME, detail=detail)

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
