"""Samples: pushed by rollout replicas under a lease, cut into the parts that the store keeps, and read by people."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from controller.errors import ApiError
from controller.ledger.group import OUTSTANDING, GroupState
from controller.ledger.group_table import GroupTable
from controller.ledger.reward_health import Failure
from controller.ledger.values import PushOutcome
from controller.state.job import JobState
from controller.state.validation.group import PREFIX
from controller.store import PayloadKey
from controller.store.payloads import Payload, text_key
from schema.util.text import one_line
from schema.wire import messages as m
from schema.wire import sample_file
from schema.wire.frame import FrameError
from schema.wire.invalid import describe
from schema.wire.messages import (
    ErrorCode,
    EventKind,
    Phase,
    PushItem,
    PushReply,
    PushResult,
    SampleRecord,
    SampleText,
)
from schema.wire.payload_file import StubEntry, entry_of, read_entry, resolve
from schema.wire.sample import LONGEST_SOURCE, TEXT_KEY, SampleHeader, header_text, read_sample_metadata

log = logging.getLogger(__name__)

NEWEST = 32
"""Files of samples that one call looks through: a controller has other things to do."""
MAX_HEADER_TEXT = 1024
"""A sample's header is kept as the text it came as, unless that is longer: spaces cost memory, too."""


@dataclass(frozen=True, slots=True)
class Push:
    """One sample as it arrived: its frame lies at `start` of the request's body."""

    item: PushItem
    frame: Payload
    start: int = 0


class PayloadParts:
    """Cuts the accepted samples of a request into parts: one for each run of neighbours of one lease."""

    def __init__(self, body: Payload) -> None:
        self._body = memoryview(body)
        self._lease: tuple[str, str] | None = None
        self._first = self._start = self._end = 0
        self._done: dict[PayloadKey, Payload] = {}

    def place(self, push: Push) -> tuple[int, int]:
        """First index and offset under which a sample is stored if it is accepted."""
        if (push.item.group_id, push.item.lease_id) == self._lease and push.start == self._end:
            return self._first, push.start - self._start
        return push.item.index, 0

    def add(self, push: Push) -> None:
        """The sample was accepted."""
        first, offset = self.place(push)
        if not offset:
            self._close()
            self._lease = push.item.group_id, push.item.lease_id
            self._first, self._start = first, push.start
        self._end = push.start + len(push.frame)

    def add_text(self, group_id: str, index: int, record: SampleRecord) -> None:
        """Keep a sample of a validation, which has no payload, until its round is filed."""
        self._done[text_key(group_id, index)] = record.model_dump_json().encode()

    def _close(self) -> None:
        if self._lease is not None:
            group_id, lease_id = self._lease
            self._done[group_id, f"{lease_id}.{self._first}"] = self._body[self._start : self._end]

    def finish(self) -> dict[PayloadKey, Payload]:
        """All parts; the bytes are shared with the body."""
        self._close()
        self._lease = None
        return self._done


class SampleService:
    """See the module's docstring."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._max_tokens = job.config.policy.model_max_length
        self._short = job.config.reward_names

    # ---- push ---------------------------------------------------------------------------------------------

    async def push(self, replica_id: str, body: Payload, pushes: Sequence[Push]) -> PushReply:
        """Take samples that lie in `body`; each gets a result of its own.

        Raises:
            ApiError, StoreUnavailable: nothing was taken.
        """
        job = self._job
        missing = await self._missing_files(pushes)  # first of all: no await may lie between the others
        job.store.require()
        job.require_room()
        replica, now = job.registry.find(replica_id), job.clock()
        if replica.role != "rollout":
            raise ApiError(ErrorCode.FORBIDDEN, f"replica {replica_id} is a {replica.role} replica")
        job.registry.seen(replica, now)
        before = self._counts()
        results: list[PushResult] = []
        parts = PayloadParts(body)
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
        progress = self._job.progress
        return progress.outstanding, progress.ready, self._job.validation.running

    def _take(self, push: Push, parts: PayloadParts, missing: set[str], now: float) -> PushOutcome:
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
            text = header_text(header)
        job, outage = self._job, self._job.rewards.outage is not None
        if item.group_id.startswith(PREFIX):
            version = job.validation.pinned  # which the last sample of a round ends
            outcome = job.validation.push(item.group_id, item.lease_id, item.index, header, job.wall(), outage=outage)
            record = self._note(push, header, metadata, outcome, version)
            if record is not None and job.validation.params.keeps_texts:
                parts.add_text(item.group_id, item.index, record)
            if job.scored_alike:
                self._judge_rewards(item, outcome, now)
            return outcome
        first, offset = parts.place(push)
        outcome = job.require_ledger().push(
            item.group_id,
            item.lease_id,
            item.index,
            header,
            len(push.frame),
            first=first,
            offset=offset,
            text=text,
            outage=outage,
        )
        self._note(push, header, metadata, outcome)
        self._judge_rewards(item, outcome, now)
        if outcome.accepted and not outcome.duplicate:
            parts.add(push)
            if header.error is not None:
                self._warn_if_dropped(item.group_id)
        return outcome

    def _note(
        self,
        push: Push,
        header: SampleHeader,
        metadata: Mapping[str, str],
        outcome: PushOutcome,
        version: int | None = None,
    ) -> SampleRecord | None:
        """Count a sample that was accepted, and keep its text, for people. Returns it with its text, if that came.

        version: the one that its round validates.
        """
        job, item = self._job, push.item
        if not outcome.accepted or outcome.duplicate:
            return None
        failure = None if header.error is None else Failure.of(header)
        kind = "" if failure is None else self._shortened(failure.kind)
        if job.reward_stats.observe(header, kind) and failure is not None:
            name, text = f"{item.group_id}/{item.index}", f"the first failure of its kind: {failure.head}"
            job.events.add(EventKind.REWARD, text, failure=kind, sample=name, error=failure.text)
        record = self.record(item, header, metadata.get(TEXT_KEY), version)
        if record is not None and (record.kind == "validation" or record.error or self._is_chosen(item.group_id)):
            job.samples.pushed(record)
        return record

    def _is_chosen(self, group_id: str) -> bool:
        """Whether the samples of a group are kept for the viewer."""
        config = self._job.config
        return sample_file.is_chosen(group_id, config.groups_per_step, config.logging.sample_groups)

    def _shortened(self, text: str) -> str:
        for name, short in self._short.items():
            text = text.replace(name, short)
        return text

    def record(
        self, item: PushItem, header: SampleHeader, text: str | None, version: int | None = None
    ) -> SampleRecord | None:
        """A sample as people read it; None of one that is not kept as text. version: that of its validation."""
        if text is None:
            return None
        try:
            known = SampleText.model_validate_json(text)
        except ValidationError as error:
            log.warning(
                "the text of sample %s/%d is not kept: %s",
                item.group_id,
                item.index,
                describe(error.errors(include_url=False)),
            )
            return None
        job, is_validation = self._job, item.group_id.startswith(PREFIX)
        group = None if is_validation else job.require_ledger().table.groups.get(item.group_id)
        validated = job.validation.find(item.group_id) if is_validation else None
        label = "" if validated is None else one_line(job.validation.params.label_of(validated.position))
        return SampleRecord(
            **known.model_dump(),
            at=job.wall(),
            kind="validation" if is_validation else "train",
            step=(version or 0) if is_validation else job.progress.committed,
            timeline=job.progress.timeline,
            group=item.group_id,
            index=item.index,
            attempt=0 if group is None else group.attempt,
            baseline=header.baseline,
            ending=header.ending,
            finish_reason=header.finish_reason,
            prompt_tokens=header.prompt_tokens,
            response_tokens=header.response_tokens,
            oldest_version=header.oldest_version,
            newest_version=header.newest_version,
            rewards={self._short.get(name, name): value for name, value in header.rewards.items()},
            score=header.score,
            extracted=header.answer,
            source=header.source,
            part=label[:LONGEST_SOURCE],
            error=header.error,
            seconds=header.seconds,
        )

    async def restore(self) -> None:
        """Read back the text of samples that wait for their step, from their payloads: a controller that starts has
        forgotten it, and so has one of steps that a rewind undoes. Raises `StoreUnavailable`.
        """
        job = self._job
        if not isinstance(job.progress, GroupTable):
            return
        groups = [
            group for state in OUTSTANDING for group in job.progress.in_state(state) if self._is_chosen(group.id)
        ]
        keys = [(group.id, meta.part) for group in groups for meta in group.samples.values()]
        parts = dict(zip(keys, await job.store.get_payloads(keys), strict=True))
        for group in groups:
            for meta in group.samples.values():
                part = parts[group.id, meta.part]
                if part is None:
                    continue
                header, metadata = read_sample_metadata(part[meta.offset : meta.offset + meta.n_bytes])
                item = PushItem(group_id=group.id, lease_id=meta.lease_id, index=meta.index)
                record = self.record(item, header, metadata.get(TEXT_KEY))
                if record is not None and record.error is None:  # failures were filed at once
                    job.samples.pushed(record)

    def _judge_rewards(self, item: PushItem, outcome: PushOutcome, now: float) -> None:
        """Judge what the end of an attempt says about the rewards."""
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

    def _warn_if_dropped(self, name: str) -> None:
        """A failed reward that costs a prompt must be seen; one that is tried again need not."""
        group = self._job.require_ledger().table.groups.get(name)
        if group is not None and group.state is GroupState.DROPPED:
            log.warning("group %s is dropped (%s): %s", name, group.reason, group.error)

    async def _missing_files(self, pushes: Sequence[Push]) -> set[str]:
        """Files that stubs among the samples name and that are not there."""
        files = self._job.payload_files
        if files is None:
            return set()
        entries: list[StubEntry] = []
        for push in pushes:
            with suppress(FrameError):  # said when its turn comes
                entry = read_entry(push.frame)
                if entry is not None:
                    entries.append(entry)
        return await files.missing(entries)

    def _stub_fault(self, item: PushItem, stub: StubEntry | None, missing: set[str]) -> PushOutcome | None:
        """Return what is wrong with the stub of a payload that lies in a file."""
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
        """Return what is wrong with a sample, whichever replica holds its lease."""
        published = self._job.publications.newest
        newest = -1 if published is None else published.version
        oldest, generated = header.oldest_version, header.response_tokens
        code = ErrorCode.BAD_FRAME
        if header.newest_version > newest:
            code = ErrorCode.FUTURE_VERSION
            detail = f"tokens of version {header.newest_version}, but the newest published version is {newest}"
        elif oldest > header.newest_version or (generated and oldest < 0):
            detail = f"weight versions {oldest} to {header.newest_version} cannot be"
        elif header.prompt_tokens + generated > header.total_tokens:
            detail = (
                f"{header.prompt_tokens} prompt and {generated} response tokens are more than "
                f"{header.total_tokens} in all"
            )
        elif header.score is None and header.error is None:
            detail = "the sample has neither score nor error"
        else:
            return None
        return PushOutcome(False, code=code, detail=detail)

    # ---- read ---------------------------------------------------------------------------------------------

    async def find(
        self, kind: m.GroupKind | None, step: int | None, order: sample_file.Order | None, limit: int
    ) -> list[SampleRecord]:
        """See `schema.wire.sample_file.find`; by `order` without a step, of the newest steps alone."""
        folder = sample_file.folder_of(self._job.run_dir)
        committed = self._job.progress.committed
        search = partial(sample_file.find, folder, kind=kind, step=step, order=order, limit=limit)
        return await asyncio.to_thread(search, newest=NEWEST, committed=committed)

    async def sample(self, name: str, index: int) -> bytes:
        """The frame of one sample. Raises `ApiError` (404) when it is not kept (any more)."""
        group = self._job.require_group(name)
        if index not in group.samples:
            raise ApiError(ErrorCode.NOT_FOUND, f"group {name} has no sample {index}")
        meta = group.samples[index]
        (part,) = await self._job.store.get_payloads([(name, meta.part)])
        if part is None:
            detail = f"the payload of sample {name}/{index} is not kept: the group is {group.state}"
            raise ApiError(ErrorCode.NOT_FOUND, detail)
        frame = part[meta.offset : meta.offset + meta.n_bytes]
        files = self._job.payload_files
        return bytes(await asyncio.to_thread(resolve, None if files is None else files.root, frame))
