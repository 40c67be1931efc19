"""Leases of groups: granted to rollout replicas, and given back.

A lease request is answered by the first of these that applies:

    finished | draining | paused (by a user, in the trainer's turn, or during an outage of rewards: see
    `controller.ledger.reward_health`) |
    update (its weights are not part of this run any more) |
    groups of the validation round | update (the last round waits for newer weights) |
    groups to train on, or the ledger's refusal: throttled, or update where newer weights would help

`throttled` and `paused` are held open for `wait_s`, all others are answered at once.

Where the bound leaves less than replicas ask for, it is dealt evenly: one that holds its share of what all that ask
could hold stands back for a moment. Else the first to ask would have all that a step sets free, and others nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from controller.ledger.group import Group
from controller.services.lease_queue import HELD_OPEN, UNEVEN, LeaseQueue
from controller.state.job import JobState
from controller.state.prompts import Prompts
from controller.state.validation.group import ValidationGroup
from schema.wire.messages import LeasedGroup, LeaseReply, LeaseRequest, LeaseStatus
from schema.wire.sample import sample_seed
from schema.wire.weights import Publication

REMEMBERED = 8192
"""Granted request ids that are remembered: several minutes of a thousand replicas."""
HUNGRY_S = 30.0
"""A replica that was given less than it asked for asks again at least so often, unless it has gone."""


class LeaseService:
    """See the module's docstring."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._sampling_seed = job.config.sampling_seed
        self._answered: dict[str, None] = {}
        """Request ids that were granted groups, the oldest first: a late duplicate gets no others."""
        self._hungry: dict[str, float] = {}
        """Replicas that were given less than they asked for, and when, the oldest first."""
        self._named: set[str] = set()
        """Replicas that were given the names of the files with all rows, after the job began with a part of them."""
        self._waiting = LeaseQueue(job.lease_signal, self._decide_later, self._alike, job.stage, lambda: job.closing)

    # ---- lease --------------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Groups, or why not. Raises `ApiError`, `StoreUnavailable`."""
        reply = await self.lease_now(request)
        return await self.lease_later(request, reply) if self.may_wait(request, reply) else reply

    async def lease_now(self, request: LeaseRequest) -> LeaseReply:
        """The answer of this moment. Raises as `lease`."""
        job = self._job
        job.acting(request.replica_id, request.incarnation, "rollout")
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

    @property
    def refused(self) -> dict[str, int]:
        """Groups that replicas ask for now and the bound refuses, by replica."""
        return self._waiting.throttled

    def _alike(self) -> bool:
        """Whether a refusal holds for every replica with the same weights."""
        job = self._job
        if job.require_ledger().table.suspects or job.ended or job.validation.pending:
            return False
        return not any(replica.state == "draining" for replica in job.registry)

    def _decide_later(self, request: LeaseRequest, patient: bool) -> LeaseReply | None:
        """The answer to a request that waits; None if its replica was lost meanwhile: the connection may be dead.
        patient: it has stood back for others."""
        replica = self._job.registry.check(request.replica_id, request.incarnation, "rollout")
        return None if replica.state == "lost" else self._decide(request, patient)

    def _decide(self, request: LeaseRequest, patient: bool = False) -> LeaseReply:
        job = self._job
        job.store.require()
        replica = job.registry.check(request.replica_id, request.incarnation, "rollout")
        if request.publication_id >= replica.publication_id:  # else this request is late
            replica.version, replica.publication_id = request.version, request.publication_id
        if job.ended:
            return LeaseReply(status=LeaseStatus.FINISHED, reason=f"the job is {job.phase}")
        if replica.state == "draining":
            return LeaseReply(status=LeaseStatus.DRAINING, reason="this replica was asked to drain")
        if job.facts.paused:
            return _paused("the job is paused")
        if job.trainer_has_devices:
            return _paused('the trainer has the devices (placement.share = "time")')
        newest = job.publications.newest
        if newest is None:
            return _throttled("no weights have been published yet")
        held = job.publications.valid(request.publication_id, request.manifest_hash)
        if held is None and not job.publications.knows(request.publication_id):  # the store has lost it
            job.publications.heard(request.publication_id)
            return _throttled(
                f"publication {request.publication_id} is not known here: waiting for its trainer, or a newer "
                f"one, to say what it is"
            )
        if held is None or held.version != request.version:
            return _update(newest, "the weights in use are not part of this run: load the newest publication")
        if request.request_id in self._answered and not self._repeats(request):
            return _throttled("this request was granted before, and what it got is done")
        if job.rewards.outage is not None and not self._repeats(request):
            return self._probe(request, newest)
        self._hungry.pop(request.replica_id, None)
        reply = self._validate(request, newest) or self._share(request, newest, patient)
        if len(reply.groups) < request.max_groups:
            self._hungry[request.replica_id] = job.clock()
        return reply

    def _probe(self, request: LeaseRequest, newest: Publication) -> LeaseReply:
        """During an outage of rewards: one group at a time, for all replicas together."""
        rewards, single = self._job.rewards, request.model_copy(update={"max_groups": 1})
        if not self._job.scored_alike and (reply := self._validate(request, newest)) is not None:
            return reply
        if rewards.probe is not None and not self._is_leased(*rewards.probe):
            rewards.probe = None  # its holder has gone
        if not rewards.may_probe(self._job.clock()):
            return _paused(rewards.note)
        reply = self._validate(single, newest) or self._train(single, newest)
        if reply.groups:
            rewards.probe = reply.groups[0].group_id, reply.groups[0].lease_id
        return reply

    def _is_leased(self, name: str, lease_id: str) -> bool:
        group = self._job.validation.find(name) or self._job.require_ledger().table.groups.get(name)
        return group is not None and group.lease_id == lease_id

    def _validate(self, request: LeaseRequest, newest: Publication) -> LeaseReply | None:
        job, validation = self._job, self._job.validation
        if self._repeats_training(request):
            return None
        groups = validation.lease(
            request.replica_id,
            request.request_id,
            request.version,
            request.publication_id,
            request.max_groups,
            job.clock(),
        )
        if groups:
            return self._granted(request, [self._validation_group(group, request) for group in groups])
        if job.progress.finished and validation.wants(request.version):
            return _update(newest, "the last validation is of newer weights")
        return None

    def _repeats(self, request: LeaseRequest) -> bool:
        validating = self._job.validation.repeats(request.replica_id, request.request_id)
        return validating or self._repeats_training(request)

    def _repeats_training(self, request: LeaseRequest) -> bool:
        held = self._job.require_ledger().table.held_by(request.replica_id)
        return any(group.request_id == request.request_id for group in held)

    def _share(self, request: LeaseRequest, newest: Publication, patient: bool) -> LeaseReply:
        """Groups to train on, no more than leaves as many for each replica that asks."""
        ledger, name, now = self._job.require_ledger(), request.replica_id, self._job.clock()
        while self._hungry and now - next(iter(self._hungry.values())) > HUNGRY_S:
            del self._hungry[next(iter(self._hungry))]
        size = request.max_groups
        if self._hungry and ledger.room and not self._repeats_training(request):
            size = min(size, ledger.level(len(self._hungry) + 1) - len(ledger.table.by_replica.get(name, ())))
        if size <= 0 and not patient:
            return UNEVEN
        return self._train(request.model_copy(update={"max_groups": max(1, size)}), newest)

    def _train(self, request: LeaseRequest, newest: Publication) -> LeaseReply:
        job = self._job
        if job.progress.finished:
            return _throttled("training is done, the job is about to finish")
        if not job.config.is_grpo:
            return _throttled("supervised training asks for answers in validations alone")
        size = request.max_groups
        if request.publication_id < newest.id:
            size = min(size, job.config.grpo.outdated_rollout_fetch_batch_size)
            if size == 0:
                return _update(newest, "outdated_rollout_fetch_batch_size = 0: update before leasing")
        decision = job.require_ledger().lease(
            request.replica_id,
            request.request_id,
            request.version,
            newest.version,
            size,
            job.clock(),
            probe=job.rewards.outage is not None,
        )
        if decision.groups:
            return self._granted(request, [self._training_group(group, request) for group in decision.groups])
        refusal = decision.refusal
        assert refusal is not None
        if refusal.update and request.publication_id < newest.id:
            return _update(newest, refusal.reason)
        return _throttled(refusal.reason)

    def _granted(self, request: LeaseRequest, groups: list[LeasedGroup]) -> LeaseReply:
        self._answered[request.request_id] = None
        if len(self._answered) > REMEMBERED:
            del self._answered[next(iter(self._answered))]
        job, name = self._job, request.replica_id
        old = job.rows_grew or not {file.digest for file in job.rows_files.values()}.issuperset(request.reads)
        news = old and job.prompts.digest not in request.reads and name not in self._named
        if news:
            self._named.add(name)
        return LeaseReply.model_construct(
            status=LeaseStatus.GRANTED,
            groups=groups,
            expires_in_s=job.config.controller.lease_timeout,
            reason="",
            update_to=None,
            rows_files=job.rows_files if news else {},
        )

    def _training_group(self, group: Group, request: LeaseRequest) -> LeasedGroup:
        ledger = self._job.require_ledger()
        params = ledger.params
        assert group.lease_id is not None
        return LeasedGroup.model_construct(  # our own values: checking thousands of token ids again is waste
            group_id=group.id,
            lease_id=group.lease_id,
            kind="train",
            epoch=group.epoch,
            position=group.position,
            attempt=group.attempt,
            **row_of(self._job.prompts, request.reads, *ledger.table.row_of(group)),
            seeds=self._seeds(self._stream_of(group), group.epoch, group.position, params.group_size),
            greedy=params.baseline,
            done=sorted(group.samples),
            deadline=group.deadline,
            pinned_version=None,
        )

    def _validation_group(self, group: ValidationGroup, request: LeaseRequest) -> LeasedGroup:
        validation, prompts = self._job.validation, self._job.validation_prompts
        assert prompts is not None
        assert group.lease_id is not None
        assert validation.pinned is not None
        return LeasedGroup.model_construct(
            group_id=validation.group_name(group),
            lease_id=group.lease_id,
            kind="validation",
            epoch=0,
            position=group.position,
            attempt=group.attempt,
            **row_of(prompts, request.reads, 0, group.position),
            seeds=self._seeds("validation", 0, group.position, validation.params.samples_of(group.position)),
            greedy=None,
            done=sorted(group.samples),
            deadline=validation.pinned,
            pinned_version=validation.pinned,
            part=validation.params.label_of(group.position),
        )

    def _stream_of(self, group: Group) -> str:
        """Name the stream in which a group has its position: those of two sources have other seeds."""
        sources = self._job.prompts.sources
        return f"train/{sources[group.source].name}" if sources else "train"

    def _seeds(self, kind: str, data_pass: int, position: int, n: int) -> list[int]:
        return [sample_seed(self._sampling_seed, kind, data_pass, position, index) for index in range(n)]

    # ---- give back ----------------------------------------------------------------------------------------

    def holder(self, lease_id: str) -> str | None:
        """Id of the replica that holds a lease, if any does."""
        return self._job.require_ledger().holder(lease_id) or self._job.validation.holder(lease_id)

    async def release(self, lease_id: str) -> bool:
        """Give a lease back; what was pushed under it is kept for the next holder."""
        job = self._job
        job.store.require()
        released = job.require_ledger().release(lease_id) or job.validation.release(lease_id)
        if released:
            job.lease_signal.notify()
        await job.save()
        return released


def row_of(
    prompts: Prompts, reads: Collection[str], data_pass: int, position: int, source: int = 0
) -> dict[str, Any]:
    """Answer the fields of a group that say which row it has. reads: digests of the files that the replica reads."""
    if prompts.digest in reads:
        index = prompts.row_index(data_pass, position, source)
        return {"row_index": index, "prompt_token_ids": [], "row": {}}
    tokens, row = prompts.get(data_pass, position, source)
    return {"row_index": None, "prompt_token_ids": tokens, "row": row}


def _paused(reason: str) -> LeaseReply:
    return LeaseReply(status=LeaseStatus.PAUSED, reason=reason)


def _throttled(reason: str) -> LeaseReply:
    return LeaseReply(status=LeaseStatus.THROTTLED, reason=reason)


def _update(newest: Publication, reason: str) -> LeaseReply:
    return LeaseReply(status=LeaseStatus.UPDATE, update_to=newest.id, reason=reason)
