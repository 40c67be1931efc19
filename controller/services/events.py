"""Events and samples on their way out: into the run's files, and to those who watch.

    change of the job ─▶ `JobState.events` ─▶ Redis (with the change) ─▶ events.jsonl ─▶ whoever follows the stream

Nothing is shown or filed before it is in the store. A file that cannot be written is reported once; events are tried
again with the next one, samples are not. Watching, and training, go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from itertools import islice

from controller.cancellation import end
from controller.errors import ApiError
from controller.notify import ChangeSignal
from controller.services.answers import AnswerService
from controller.state.job import JobState
from controller.store import StoreUnavailable
from schema.wire import event_file, sample_file
from schema.wire.messages import ErrorCode, Event, EventKind, SampleRecord

log = logging.getLogger(__name__)

KEEP_ALIVE = 15.0
"""Seconds without an event after which a line is sent that says nothing: proxies end what is silent."""
RETRY = 1.0
"""Seconds until the store is asked again while it is away."""
CHUNK = 512
"""Events of the past that are read from the file at once."""
MOST_STREAMS = 64
"""Viewers at once: each is a connection."""


class EventService:
    """See the module's docstring. `start` begins to file."""

    def __init__(self, job: JobState, answers: AnswerService) -> None:
        self._job, self._answers = job, answers
        self._stored = job.events.filed
        """The events that viewers may see."""
        self._signal = ChangeSignal()
        self._failing = False
        self._records: list[SampleRecord] = []
        """Samples that are to be written."""
        self._rewinds: list[sample_file.Rewind] = []
        """The rewinds that their file does not have yet."""
        self._files = sample_file.Writer(sample_file.folder_of(job.run_dir), job.config.logging.sample_bytes)
        self._said_full = False
        self._streams = 0
        self._task: asyncio.Task[None] | None = None

    # ---- file ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to file events, those first that an earlier controller did not get to."""
        self._task = asyncio.create_task(self._run(), name="events")

    async def stop(self) -> None:
        """File what is stored, and end."""
        if self._task is not None:
            await end([self._task])
            await self._file()
            with suppress(StoreUnavailable):  # the next controller files them
                await self._answers.file_validations()

    async def _run(self) -> None:
        while True:
            seen, highest = self._job.event_signal.generation, self._job.events.highest
            self._records += self._job.samples.take()
            try:
                await self._job.store.flush()
            except StoreUnavailable:
                await asyncio.sleep(RETRY)
                continue
            self._stored = highest
            await self._file()
            self._signal.notify()
            with suppress(StoreUnavailable):  # then with the next event
                await self._answers.file_validations()
            await self._job.event_signal.wait(seen, KEEP_ALIVE)

    async def _file(self) -> None:
        events = [event for event in self._job.events.after(self._job.events.filed) if event.id <= self._stored]
        records, self._records = self._records, []
        try:
            await asyncio.to_thread(self._write, events, records)
        except OSError as error:
            if not self._failing:
                log.error("%s cannot be written: %s; training goes on", error.filename, error.strerror)
            self._failing = True
            return
        self._failing = False

    def _write(self, events: list[Event], records: list[SampleRecord]) -> None:
        """Write samples first: whoever reads that a step is trained, or a version validated, finds its samples."""
        rewinds = [event.data for event in events if event.kind is EventKind.REWIND]
        self._rewinds += [sample_file.Rewind(timeline=data["timeline"], step=data["step"]) for data in rewinds]
        try:
            left_out = self._files.append(records, self._rewinds)
            self._rewinds = []
        finally:
            if events:
                event_file.append(self._job.event_file, events)
                self._job.events.filed = events[-1].id
        if left_out and not self._said_full:
            self._said_full = True
            log.warning(
                "%d samples are counted, but not kept as text: those of a step may take a quarter of "
                "logging.sample_bytes, and its failures an eighth of that",
                left_out,
            )

    # ---- stream -------------------------------------------------------------------------------------------

    def stream(self, after: int, kinds: Collection[EventKind], *, follow: bool) -> AsyncIterator[bytes]:
        """Events with ids above `after` as server-sent events; of these `kinds`, or of all. Raises `ApiError`."""
        if self._streams >= MOST_STREAMS:
            detail = f"{MOST_STREAMS} viewers follow the events already: close one of them"
            raise ApiError(ErrorCode.BUSY, detail, retry_after=5)
        return self._stream(after, frozenset(kinds), follow)

    async def _stream(self, after: int, kinds: frozenset[EventKind], follow: bool) -> AsyncIterator[bytes]:
        job = self._job
        after = after if after <= job.events.highest else 0  # of another job, or of history that was lost
        self._streams += 1
        try:
            yield b"retry: 2000\n\n"
            while True:
                seen, stored = self._signal.generation, self._stored
                if after < min(stored, job.events.filed) and job.events.oldest > after + 1:
                    past = event_file.read(job.event_file, after)
                    while events := await asyncio.to_thread(_chunk, past):
                        after = events[-1].id
                        yield _lines(events, kinds)
                recent = [event for event in job.events.after(after) if event.id <= stored]
                yield _lines(recent, kinds) or b": still here\n\n"
                after = max(after, stored)
                if not follow or job.closing or not job.store.in_charge:
                    return
                await self._signal.wait(seen, KEEP_ALIVE)
        finally:
            self._streams -= 1


def _chunk(events: Iterator[Event]) -> list[Event]:
    return list(islice(events, CHUNK))


def _lines(events: list[Event], kinds: frozenset[EventKind]) -> bytes:
    """The wire form of server-sent events (WHATWG HTML, section 9.2)."""
    return b"".join(
        b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), event.model_dump_json().encode())
        for event in events
        if not kinds or event.kind in kinds
    )
