"""All answers of a job in `logging.samples_dir`: a file for each step that was trained, and for each validation.

    <samples_dir>/<job id>/train/step-00000012.jsonl        of the groups that step 12 trained
    <samples_dir>/<job id>/validation/step-00000012.jsonl   of the validation of version 12

A line is an answer. A file is whole or absent, and is written again when its step is: a step's before its commit
counts, so that a commit which is tried again after a crash has the same file; a validation's before its texts leave
the store. What a rewind undid is replaced, or removed with the first step that is trained then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import IO

from controller.ledger.group import Group
from controller.services.samples import SampleService
from controller.state.job import JobState
from controller.state.validation.group import EndedRound
from controller.store.payloads import text_key
from schema.config import Config
from schema.util.atomic_file import replacing
from schema.wire import sample_file
from schema.wire.messages import PushItem, SampleRecord, SampleText
from schema.wire.messages.base import GroupKind
from schema.wire.sample import TEXT_KEY, read_sample_metadata

log = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""Texts of a validation that are read from the store at once."""
NO_TEXT = SampleText(prompt="", answer="").model_dump_json()
"""The text of a sample that was given up before it had any."""
_NAME = re.compile(r"step-(\d{8,15})\.jsonl", re.ASCII)
_LEFT_OUT = {"at", "kind", "replica", "pieces", "logprobs", "versions", "weights", "advantage", "trainer_logprobs",
    "seconds", "dropped"}  # fmt: skip
"""Fields of records that answers do not have: those of tokens, and those that another writing would change."""

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that some readers take for the end of a line, as JSON may write them."""


class AnswerService:
    """Reads answers from the store, in which they are until they are filed: nothing of a kill is lost."""

    def __init__(self, job: JobState, samples: SampleService) -> None:
        self._job, self._samples = job, samples
        self._files = AnswerFiles.of_config(job.config, job.job_id)

    async def file_step(self, step: int) -> None:
        """Write the answers of the batch of `step` if it is about to be committed. Raises `StoreUnavailable`."""
        progress = self._job.progress
        if self._files is not None and step == progress.committed and (batch := self._job.ledger.batch(step)):
            await self._files.write_step(step, progress.timeline, self._of_batch(step, batch))

    async def _of_batch(self, step: int, batch: Sequence[Group]) -> AsyncIterator[list[SampleRecord]]:
        """The samples of a batch from their payloads, group by group."""
        change = {"step": step, "timeline": self._job.progress.timeline}
        for group in sorted(batch, key=lambda group: sample_file.place_of(group.id)):
            metas = sorted(group.samples.values(), key=lambda meta: meta.index)
            keys = [(group.id, meta.part) for meta in metas]
            parts = dict(zip(keys, await self._job.store.get_payloads(keys), strict=True))
            records = []
            for meta in metas:
                part = parts[group.id, meta.part]
                if part is None:
                    log.error("the answer %s/%d is not in the store any more", group.id, meta.index)
                    continue
                _, metadata = read_sample_metadata(part[meta.offset : meta.offset + meta.n_bytes])
                item = PushItem(group_id=group.id, lease_id=meta.lease_id, index=meta.index)
                record = self._samples.record(item, meta.header, metadata.get(TEXT_KEY) or NO_TEXT)
                if record is not None:
                    records.append(record.model_copy(update=change))
            yield records

    async def file_validations(self) -> None:
        """Write the answers of the rounds that have ended, and forget their texts. Raises `StoreUnavailable`."""
        validation = self._job.validation
        while self._files is not None and validation.unfiled:
            ended = validation.unfiled[0]
            await self._job.store.flush()  # the push that has ended it may be on its way there
            await self._files.write_validation(ended.version, self._of_round(ended))
            if ended in validation.unfiled:  # else a rewind undid it meanwhile
                validation.filed(ended)
            await self._job.save()

    async def _of_round(self, ended: EndedRound) -> AsyncIterator[list[SampleRecord]]:
        keys = [text_key(*name) for name in self._job.validation.samples_of(ended.round_id)]
        missing = 0
        for first in range(0, len(keys), READ_AT_ONCE):
            texts = await self._job.store.get_payloads(keys[first : first + READ_AT_ONCE])
            missing += texts.count(None)
            yield [SampleRecord.model_validate_json(text) for text in texts if text is not None]
        if missing:
            log.error("%d answers to version %d are not in the store any more", missing, ended.version)


class AnswerFiles:
    """The files of one job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._timeline: int | None = None
        """The timeline whose files alone are there."""

    @classmethod
    def of_config(cls, config: Config, job_id: str) -> AnswerFiles | None:
        """The files of a job; None: it keeps none."""
        directory = config.logging.samples_dir
        return cls(Path(directory) / job_id) if directory and config.generates else None

    async def write_step(self, step: int, timeline: int, chunks: AsyncIterator[Sequence[SampleRecord]]) -> None:
        """Write the answers of a step that is trained in this timeline. A fault of the disk is logged."""
        await self._write("train", step, chunks)
        if timeline != self._timeline:
            await asyncio.to_thread(self._remove_later, step)
            self._timeline = timeline

    async def write_validation(self, version: int, chunks: AsyncIterator[Sequence[SampleRecord]]) -> None:
        """Write the answers of the validation of a version. A fault of the disk is logged."""
        await self._write("validation", version, chunks)

    def path_of(self, kind: GroupKind, step: int) -> Path:
        """The file of a step, or of the validation of a version."""
        return self.directory / kind / f"step-{step:08d}.jsonl"

    async def _write(self, kind: GroupKind, step: int, chunks: AsyncIterator[Sequence[SampleRecord]]) -> None:
        path = self.path_of(kind, step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as neighbour, neighbour.open("wb") as file:
                async for records in chunks:
                    await asyncio.to_thread(_append, file, records)
                await asyncio.to_thread(_sync, file)
        except OSError as error:
            log.error("%s is not written: %s; training goes on", path, error.strerror or error)

    def _remove_later(self, step: int) -> None:
        """Remove files of later steps, and of validations of later versions: a rewind undid them."""
        for kind in ("train", "validation"):
            for path in (self.directory / kind).glob("step-*.jsonl"):
                match = _NAME.fullmatch(path.name)
                if match and int(match[1]) > step:
                    path.unlink(missing_ok=True)


def _append(file: IO[bytes], records: Sequence[SampleRecord]) -> None:
    lines = (record.model_dump_json(exclude=_LEFT_OUT).translate(_LINE_ENDS) for record in records)
    file.write("".join(f"{line}\n" for line in lines).encode())


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
