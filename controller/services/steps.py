"""What trainers do: fetch the batch of a step, commit it, register checkpoints.

All calls present the policy epoch of their registration; after another registration they are refused, so a
trainer that was replaced can neither commit nor publish.

A batch without any sample is the answer when no step follows after all (the last groups were dropped): the
trainer then publishes, exports and leaves as after a commit that said `finished`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.ledger.assembly import Place, Waiting, build_table, places
from controller.ledger.ledger import Ledger, LedgerError
from controller.services.errors import ProblemError
from controller.state.job import Job
from controller.state.replicas import Replica
from controller.state.step_log import own_counts
from schema.wire import messages as m
from schema.wire.batch import StepTable, batch_digest, encode_batch
from schema.wire.messages import ErrorCode, Phase
from schema.wire.payload_file import read_entry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's batch as it was assembled: its table, and where the payload of each row is."""

    table: StepTable
    places: list[Place] = field(default_factory=list)


class Training:
    """The calls of policy replicas."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batch: Batch | None = None
        """The one assembled last."""

    def check_epoch(self, epoch: int) -> None:
        current = self._job.facts.policy_epoch
        if epoch != current:
            raise ProblemError(
                ErrorCode.STALE_EPOCH,
                f"policy epoch {epoch} has ended, the current one is {current}: another trainer has registered",
            )

    def check(self, replica_id: str, incarnation: int, epoch: int) -> Replica:
        job = self._job
        job.store.require()
        if job.facts.ended is Phase.FAILED:
            raise ProblemError(ErrorCode.JOB_FAILED, f"the job has failed: {job.facts.last_error}")
        self.check_epoch(epoch)
        replica = job.registry.check(replica_id, incarnation, "policy")
        job.registry.seen(replica, job.clock())
        return replica

    # ---- batch --------------------------------------------------------------------------------------------

    async def batch(self, step: int, epoch: int, rows: Sequence[int] | None, wait_s: float) -> bytes | None:
        """The batch of `step` with the payloads of `rows` (None: all); None when it is not ready in time.

        Raises `ProblemError`, `LedgerError`.
        """
        job, loop = self._job, asyncio.get_running_loop()
        ledger = job.require_ledger()
        give_up = loop.time() + wait_s
        while True:
            job.store.require()
            seen = job.batch_signal.generation
            self.check_epoch(epoch)
            batch = self._assemble(ledger, step)
            await job.save()
            if batch is not None and (data := await self._with_payloads(batch, rows)) is not None:
                return data
            left = give_up - loop.time()
            if left <= 0 or job.closing:
                return None
            await job.batch_signal.wait(seen, left)

    def _assemble(self, ledger: Ledger, step: int) -> Batch | None:
        job = self._job
        job.settle()  # data that ran out before the first step is a failure, not a batch without samples
        if job.facts.ended is Phase.FAILED:
            job.stage()
            raise ProblemError(ErrorCode.JOB_FAILED, f"the job has failed: {job.facts.last_error}")
        if step != ledger.committed:
            detail = f"the batch of step {step} was asked for, but step {ledger.committed} is next"
            raise LedgerError(ErrorCode.WRONG_STEP, detail)
        if job.ended:
            return None
        key = (step, ledger.timeline, job.facts.policy_epoch)
        if ledger.finished:
            return Batch(build_table(*key, []))
        if job.facts.paused and ledger.batch(step) is None:
            return None
        assembled = ledger.assemble(job.clock())
        if isinstance(assembled, Waiting):
            # dropping stragglers may have ended the data
            return self._assemble(ledger, step) if ledger.finished else None
        names, known = [group.id for group in assembled.groups], self._batch
        if known is None or _key(known.table) != (*key, names):
            self._batch = known = Batch(build_table(*key, assembled.groups), places(assembled.groups))
            job.lease_signal.notify()  # the slots of this step are taken, those of the next are open
        return known

    async def _with_payloads(self, batch: Batch, rows: Sequence[int] | None) -> bytes | None:
        """The table with payloads; None if some of these are gone: their groups are made again."""
        table = batch.table
        wanted = range(table.n_samples) if rows is None else rows
        outside = [row for row in wanted if not 0 <= row < table.n_samples]
        if outside or len(set(wanted)) != len(wanted):
            fault = f"row {outside[0]}" if outside else "a row twice"
            raise ProblemError(ErrorCode.BAD_REQUEST, f"{fault} of a batch of {table.n_samples} samples")
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
        gone |= await self._without_file(frames)
        if gone:
            self._job.store.require()  # a successor may have removed them while this process was suspended
            self._make_again(batch, gone)
            await self._job.save()
            return None
        return encode_batch(table, frames)

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
        ledger.lost_payloads(sorted(gone))
        self._batch = None
        job.lease_signal.notify()
        job.batch_signal.notify()

    # ---- commit, checkpoint ------------------------------------------------------------------------------

    async def commit(self, step: int, request: m.CommitRequest) -> m.CommitReply:
        """Finish a step; durable when answered. Raises `ProblemError`, `LedgerError`, `ReplicaError`."""
        job = self._job
        self.check(request.replica_id, request.incarnation, request.policy_epoch)
        self._check_batch(step, request.batch)
        samples, tokens, score = self._work(step, request.metrics)
        outcome = job.progress.commit(step)
        if not outcome.duplicate:
            job.trained(
                m.StepRecord(step=step, at=job.wall(), metrics=request.metrics), samples, tokens, score
            )
        finished = job.progress.finished or job.ended
        reply = m.CommitReply(
            committed_steps=job.progress.committed,
            total_steps=job.progress.total_steps,
            publish=finished or self._publication_due(step + 1),
            finished=finished,
            epochs=job.progress.epochs,
        )
        await job.save_durably()
        durable = (
            reply.committed_steps if job.store.facts.keeps_what_it_acknowledges else job.progress.durable
        )
        return reply.model_copy(update={"durable_steps": durable})

    def _check_batch(self, step: int, digest: str) -> None:
        """That the batch which was trained is the one that was assembled here: else the store has lost history."""
        ledger = self._job.ledger
        if ledger is None or not digest or step < ledger.committed:
            return
        names = [group.id for group in ledger.batch(step) or []]
        if not names or batch_digest(ledger.timeline, step, names) != digest:
            detail = f"the batch of step {step} that was trained is not known here: declare yourself first"
            raise LedgerError(ErrorCode.WRONG_STEP, detail)

    def _work(self, step: int, metrics: dict[str, float]) -> tuple[int, int, float | None]:
        """Samples, generated tokens and mean score of a step; a supervised trainer counts for itself."""
        ledger = self._job.ledger
        if ledger is None:
            return *own_counts(metrics), None
        headers = [meta.header for group in ledger.batch(step) or [] for meta in group.samples.values()]
        scores = [header.score for header in headers if header.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        return len(headers), sum(header.response_tokens for header in headers), mean

    def _publication_due(self, version: int) -> bool:
        return version % self._job.config.train.sync_weight_interval == 0

    async def checkpoint(self, request: m.CheckpointRequest) -> m.CheckpointReply:
        """A complete checkpoint covers `step` committed steps: they are durable now."""
        job = self._job
        self.check(request.replica_id, request.incarnation, request.policy_epoch)
        durable = job.progress.checkpoint(request.step)
        log.info("checkpoint %s covers %d steps", request.path, request.step)
        await job.save_durably()
        return m.CheckpointReply(durable_steps=durable, scores=self._scores())

    def _scores(self) -> dict[int, float]:
        """Mean score of each validated version of this timeline."""
        records = {} if self._job.validation is None else self._job.validation.records
        return {
            version: record.score_mean for version, record in records.items() if record.score_mean is not None
        }


def _key(table: StepTable) -> tuple[int, int, int, list[str]]:
    return table.step, table.timeline, table.policy_epoch, table.group_ids
