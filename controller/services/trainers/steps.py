"""Trainers fetch the batch of a step, commit it, register checkpoints.

All calls present the policy epoch of their registration; after another registration they are refused, so a
trainer that was replaced can neither commit nor publish.

A batch without any sample is the answer when no step follows after all (the last groups were dropped): the
trainer then publishes, exports and leaves as after a commit that said `finished`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from controller.errors import ApiError
from controller.ledger.assembly import Assembled, PayloadRef, WaitingStep, build_table, places
from controller.ledger.ledger import Ledger
from controller.ledger.rejoin import lost_payloads
from controller.services.answers import AnswerService
from controller.state.job import JobState
from controller.state.replicas import Replica
from controller.state.step_log import mean_score, own_counts
from schema.wire import messages as m
from schema.wire.batch import StepTable, batch_digest, encode_batch
from schema.wire.messages import ErrorCode, EventKind, Phase
from schema.wire.payload_file import read_entry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's batch as it was assembled: its table, and where the payload of each row is."""

    table: StepTable
    places: list[PayloadRef] = field(default_factory=list)


class StepService:
    """The calls of policy replicas."""

    def __init__(self, job: JobState, answers: AnswerService) -> None:
        self._job, self._answers = job, answers
        self._batch: Batch | None = None
        """The one assembled last."""
        self._prefetched: Batch | None = None
        """The batch that the next one would be, as it was asked for last."""

    def check_policy_epoch(self, policy_epoch: int) -> None:
        current = self._job.facts.policy_epoch
        if policy_epoch != current:
            raise ApiError(
                ErrorCode.STALE_EPOCH,
                f"policy epoch {policy_epoch} has ended, the current one is {current}: another trainer has "
                f"registered",
            )

    def check(self, replica_id: str, incarnation: int, policy_epoch: int) -> Replica:
        """The trainer, if it may commit, publish and save. Raises `ApiError`, `StoreUnavailable`."""
        job = self._job
        job.store.require()
        if job.facts.ended is Phase.FAILED:
            raise ApiError(ErrorCode.JOB_FAILED, f"the job has failed: {job.facts.last_error}")
        self.check_policy_epoch(policy_epoch)
        replica = job.acting(replica_id, incarnation, "policy")
        if job.membership is not None and not job.leads(replica_id):
            leader = job.membership.leader or "nobody"
            raise ApiError(ErrorCode.STALE_INCARNATION, f"{replica_id} does not lead the trainers: {leader} does")
        return replica

    # ---- batch --------------------------------------------------------------------------------------------

    async def batch(self, step: int, policy_epoch: int, rows: Sequence[int] | None, wait_s: float) -> bytes | None:
        """The batch of `step` with the payloads of `rows` (None: all); None when it is not ready in time.

        Raises `ApiError`.
        """
        job = self._job
        ledger = job.require_ledger()

        async def find() -> bytes | None:
            batch = self._assemble(ledger, step)
            job.scaling.trainer(job.clock(), "waits" if batch is None else "works")
            await job.save()
            return None if batch is None else await self._with_payloads(batch, rows)

        return await self._poll(find, policy_epoch, wait_s)

    async def prefetch(self, step: int, policy_epoch: int, rows: Sequence[int] | None, wait_s: float) -> bytes | None:
        """Return what the batch of `step` would be if the one before were committed now; None once it is, or after
        the wait.

        A trainer fetches it while it is at work. Nothing is decided by it: the batch may still become another one.

        Raises `ApiError`.
        """
        job = self._job
        ledger = job.require_ledger()

        async def find() -> bytes | None:
            assembled = None if ledger.batch(step - 1) is None else ledger.prefetch()
            if not isinstance(assembled, Assembled):
                return None
            batch = self._prefetched = _batch(
                self._prefetched, (step, ledger.table.timeline, policy_epoch), assembled
            )
            await job.save()  # payloads that were taken before may be on their way to the store
            frames, gone = await self._payloads(batch, rows)
            return None if gone else encode_batch(batch.table, frames)

        return await self._poll(find, policy_epoch, wait_s, lambda: step <= ledger.table.committed or job.ended)

    async def _poll(
        self,
        find: Callable[[], Awaitable[bytes | None]],
        policy_epoch: int,
        wait_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> bytes | None:
        """Return what `find` finds, asked again whenever groups have changed; None after the wait, or when it is
        `over`."""
        job, loop = self._job, asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        while True:
            job.store.require()
            seen = job.batch_signal.generation
            self.check_policy_epoch(policy_epoch)
            if (data := await find()) is not None:
                return data
            left = give_up - loop.time()
            if left <= 0 or job.closing or over():
                return None
            await job.batch_signal.wait(seen, left)

    def _assemble(self, ledger: Ledger, step: int) -> Batch | None:
        job = self._job
        job.settle()  # data that ran out before the first step is a failure, not a batch without samples
        if job.facts.ended is Phase.FAILED:
            job.stage()
            raise ApiError(ErrorCode.JOB_FAILED, f"the job has failed: {job.facts.last_error}")
        table = ledger.table
        if step != table.committed:
            detail = f"the batch of step {step} was asked for, but step {table.committed} is next"
            raise ApiError(ErrorCode.WRONG_STEP, detail)
        if job.ended:
            return None
        key = (step, table.timeline, job.facts.policy_epoch)
        if table.finished:
            return Batch(build_table(*key, []))
        if job.facts.paused and ledger.batch(step) is None:
            return None
        lost = job.restarted and self._batch is None and ledger.batch(step) is None
        assembled = ledger.assemble(job.clock())
        if isinstance(assembled, WaitingStep):
            # dropping stragglers may have ended the data
            return self._assemble(ledger, step) if table.finished else None
        batch = _batch(self._batch, key, assembled)
        if batch is not self._batch:
            self._batch = batch
            if lost and job.membership is not None:  # of a forgotten batch results may have been exchanged already
                job.membership.broken(job.membership.leader, job.membership.epoch)
            job.lease_signal.notify()  # the slots of this step are taken, those of the next are open
        return batch

    async def _with_payloads(self, batch: Batch, rows: Sequence[int] | None) -> bytes | None:
        """The table with payloads; None if some of these are gone: their groups are made again."""
        frames, gone = await self._payloads(batch, rows)
        if gone:
            self._job.store.require()  # a successor may have removed them while this process was suspended
            self._make_again(batch, gone)
            await self._job.save()
            return None
        return encode_batch(batch.table, frames)

    async def _payloads(self, batch: Batch, rows: Sequence[int] | None) -> tuple[list[memoryview], set[str]]:
        """Payloads of these rows (None: all), and the groups of those that are gone."""
        table = batch.table
        wanted = range(table.n_samples) if rows is None else rows
        outside = [row for row in wanted if not 0 <= row < table.n_samples]
        if outside or len(set(wanted)) != len(wanted):
            fault = f"row {outside[0]}" if outside else "a row twice"
            raise ApiError(ErrorCode.BAD_REQUEST, f"{fault} of a batch of {table.n_samples} samples")
        chosen = [batch.places[row] for row in wanted]
        keys = list(dict.fromkeys(key for key, _, _ in chosen))
        parts = dict(zip(keys, await self._job.store.get_payloads(keys), strict=True))
        frames: list[memoryview] = []
        gone: set[str] = set()
        for key, start, end in chosen:
            part = parts[key]
            if part is None or len(part) < end:
                gone.add(key[0])
            else:
                frames.append(memoryview(part)[start:end])
        return frames, gone | await self._without_file(frames)

    async def _without_file(self, frames: Sequence[memoryview]) -> set[str]:
        """Groups of those frames that stand for a file which is not there any more."""
        files = self._job.payload_files
        if files is None:
            return set()
        entries = [entry for frame in frames if (entry := read_entry(frame)) is not None]
        return {name.partition(".")[0] for name in await files.missing(entries)}

    def _make_again(self, batch: Batch, gone: set[str]) -> None:
        """Payloads that the store names and does not have: it lost history, and they were deleted in what it lost."""
        job, ledger = self._job, self._job.require_ledger()
        if self._batch is not batch or ledger.batch(batch.table.step) is None:
            return  # the step was assembled anew, committed or given up meanwhile
        log.error("payloads of %d groups are not in the store: they are made again", len(gone))
        lost_payloads(ledger.table, sorted(gone))
        self._batch = None
        if job.membership is not None:
            job.membership.renew()
            job.member_signal.notify()
        job.lease_signal.notify()
        job.batch_signal.notify()

    # ---- commit, checkpoint ------------------------------------------------------------------------------

    async def commit(self, step: int, request: m.CommitRequest) -> m.CommitReply:
        """Finish a step; durable when answered. Raises `ApiError`."""
        job = self._job
        await self._answers.file_step(step)
        self.check(request.replica_id, request.incarnation, request.policy_epoch)
        self._check_batch(step, request.batch)
        if any(record.version not in (0, step + 1) for record in request.validations):
            raise ApiError(ErrorCode.BAD_REQUEST, f"the commit of step {step} validates another version")
        work = self._work(step, request.metrics)
        groups = [group.id for group in job.ledger.batch(step) or []]
        if job.ledger.commit(step):
            job.batch_signal.notify()  # requests to prefetch the next step end
            if job.membership is not None:
                job.membership.committed(step)
                job.member_signal.notify()
            job.scaling.committed(job.clock(), len(groups))
            job.samples.trained(step, job.progress.timeline, groups, request.samples)
            record = m.StepRecord(step=step, at=job.wall(), metrics=request.metrics)
            job.trained(record, *work, request.validations)
        reply = job.commit_reply(publish=job.is_published(step + 1))
        await job.save_durably()
        durable = reply.committed_steps if job.store.facts.keeps_what_it_acknowledges else job.progress.durable
        return reply.model_copy(update={"durable_steps": durable})

    def _check_batch(self, step: int, digest: str) -> None:
        """Check that the batch which was trained is the one that was assembled here: else the store has lost
        history."""
        job = self._job
        if not digest or step < job.progress.committed or not job.config.is_grpo:
            return
        names = [group.id for group in job.ledger.batch(step) or []]
        if not names or batch_digest(job.progress.timeline, step, names) != digest:
            detail = f"the batch of step {step} that was trained is not known here: declare yourself first"
            raise ApiError(ErrorCode.WRONG_STEP, detail)

    def _work(self, step: int, metrics: dict[str, float]) -> tuple[int, int, float | None]:
        """All samples of a step, their generated tokens, and the mean score of those whose score counts; a supervised
        trainer counts for itself."""
        if not self._job.config.is_grpo:
            return *own_counts(metrics), None
        batch = self._job.ledger.batch(step) or []
        samples = [meta for group in batch for meta in group.samples.values() if not meta.baseline]
        headers = [meta.header for meta in samples]
        tokens = sum(header.response_tokens for header in headers)
        scores = [header.score for meta, header in zip(samples, headers, strict=True) if meta.usable]
        return len(headers), tokens, mean_score(scores)

    async def checkpoint(self, request: m.CheckpointRequest) -> m.CheckpointReply:
        """A complete checkpoint covers `step` committed steps: they are durable now."""
        job = self._job
        self.check(request.replica_id, request.incarnation, request.policy_epoch)
        durable = job.ledger.checkpoint(request.step)
        log.info("checkpoint %s covers %d steps", request.path, request.step)
        text = f"checkpoint {request.path} covers {request.step} steps"
        job.events.add(EventKind.CHECKPOINT, text, step=request.step, path=request.path)
        await job.save_durably()
        records = job.validation.records.items()  # of supervised training the losses alone are compared
        judged = (entry for entry in records if job.config.is_grpo or entry[1].loss is not None)
        goodness_by_version = {version: record.goodness for version, record in judged}
        scores = {version: goodness for version, goodness in goodness_by_version.items() if goodness is not None}
        return m.CheckpointReply(durable_steps=durable, scores=scores)


def _batch(known: Batch | None, key: tuple[int, int, int], assembled: Assembled) -> Batch:
    """The batch of these groups, or `known` if it is the same. key: step, timeline, policy epoch."""
    groups, where = assembled.groups, places(assembled.groups)
    names = [group.id for group in groups]
    if known is not None and known.places == where:
        table = known.table
        if (table.step, table.timeline, table.policy_epoch, table.group_ids) == (*key, names):
            return known
    return Batch(build_table(*key, groups), where)
