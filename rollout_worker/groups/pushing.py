"""Pushing: finished samples go to the controller as they come, several in one request.

A sample waits at most LINGER_S for company, and not at all when nothing else is on its way. What the controller
says to each of them:

    accepted            done (a duplicate too: it was stored before)
    lease_lost          the lease is declared, which the controller may have forgotten; if it is not taken back, the
                        whole group is dropped: another replica makes it
    anything else       a fault of this sample: logged, its lease is given back for another attempt
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from controller.client import Refused
from controller.client import calls as api
from rollout_worker.engines.base import Generation
from rollout_worker.lease_table import LeaseTable
from rollout_worker.session import Session
from schema.config import Config
from schema.util.text import one_line
from schema.wire import payload_file
from schema.wire.messages import ErrorCode, LeasedGroup, PushItem, PushList, PushReply, PushResult
from schema.wire.payload_file import FileName
from schema.wire.sample import LONGEST_SOURCE, Ending, FinishReason, Sample, SampleHeader, encode_sample

log = logging.getLogger(__name__)

LINGER_S = 0.04
LOOK_S = 0.01
MAX_ITEMS = 512
SHARE_OF_LIMIT = 0.5
"""A request stays well below `controller.max_request_bytes`: the bundle's header comes on top."""
MAX_ERROR = 8192
"""Characters of an error that travel."""
_UNKNOWN = (ErrorCode.LEASE_LOST, ErrorCode.NOT_FOUND)
"""Refusals of a sample whose lease, or group, is not known."""
_NO_TOKENS = np.zeros(0, np.int32)
NOTHING = Generation("", 0, _NO_TOKENS, np.zeros(0, np.float32), _NO_TOKENS, _NO_TOKENS, "stop")
"""The generation where none was possible."""


@dataclass(frozen=True, slots=True)
class _Entry:
    lease: LeasedGroup
    index: int
    frame: bytes
    declared: bool = False
    """Whether its lease was unknown to the controller before, and was taken back."""


@dataclass(frozen=True, slots=True)
class SharedPayloads:
    """The directory through which large samples reach the trainer (see `schema.wire.payload_file`)."""

    root: Path
    least_bytes: int

    def put(self, batch: Sequence[_Entry]) -> list[bytes]:
        """Return what is pushed of each sample. A directory that cannot be written is passed by: Redis takes the
        sample."""
        return [self._put(entry) if self._is_large(entry) else entry.frame for entry in batch]

    def _is_large(self, entry: _Entry) -> bool:
        return entry.lease.kind == "train" and len(entry.frame) >= self.least_bytes

    def _put(self, entry: _Entry) -> bytes:
        name = FileName(entry.lease.group_id, entry.lease.lease_id, entry.index)
        try:
            return payload_file.write(self.root, name, entry.frame)
        except OSError as error:
            log.warning("payload %s goes through the controller: %s: %s", name, self.root, error)
            return entry.frame


def shared_payloads(config: Config, job_id: str) -> SharedPayloads | None:
    """The directory that the config names, if it names one."""
    store = config.controller.payload_store
    if not store:
        return None
    return SharedPayloads(payload_file.directory(store, job_id), config.controller.payload_bytes)


class Pusher:
    """The queue of finished samples, and the loop that empties it."""

    def __init__(
        self, session: Session, leases: LeaseTable, max_request_bytes: int, shared: SharedPayloads | None = None
    ) -> None:
        self._session, self._leases, self._shared = session, leases, shared
        self._max_bytes = int(max_request_bytes * SHARE_OF_LIMIT)
        self._queue: deque[_Entry] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.on_lost: Callable[[list[str]], None] = lambda lease_ids: None
        self.on_pushed: Callable[[], None] = lambda: None

    def add(self, lease: LeasedGroup, sample: Sample) -> None:
        self._queue.append(_Entry(lease, sample.header.index, encode_sample(sample)))
        self._empty.clear()
        self._filled.set()

    def fail(
        self, lease: LeasedGroup, index: int, error: str, ending: Ending = "engine_error", kept: str | None = None
    ) -> None:
        """Push a sample that cannot be had. kept: as in `to_sample`."""
        self.add(lease, failed(lease, index, error, ending, kept))

    def drop(self, lease_ids: Collection[str]) -> None:
        """Leave out what is queued of these leases."""
        self._queue = deque(entry for entry in self._queue if entry.lease.lease_id not in lease_ids)

    async def flush(self) -> None:
        """Until nothing is queued and nothing on its way."""
        await self._empty.wait()

    async def run(self) -> None:
        """For ever. Raises `ControllerError`."""
        while True:
            await self._filled.wait()
            await self._linger()
            self._filled.clear()
            while self._queue:
                sizes = [len(entry.frame) for entry in self._queue]
                count = cut_batch(sizes, self._max_bytes, MAX_ITEMS)
                await self._send([self._queue.popleft() for _ in range(count)])
                self.on_pushed()
            self._empty.set()

    async def _linger(self) -> None:
        """A request costs about as much as scoring and encoding twenty samples, so company is worth a wait."""
        for _ in range(round(LINGER_S / LOOK_S)):
            if len(self._queue) >= self._leases.samples:
                return
            await asyncio.sleep(LOOK_S)

    async def _send(self, batch: list[_Entry]) -> None:
        items = [
            PushItem(group_id=entry.lease.group_id, lease_id=entry.lease.lease_id, index=entry.index)
            for entry in batch
        ]
        frames = [entry.frame for entry in batch]
        if self._shared is not None:
            frames = await asyncio.to_thread(self._shared.put, batch)
        try:
            reply: PushReply = await self._session.call(
                lambda session: api.push_many(PushList(replica_id=session.replica_id, pushes=items), frames)
            )
        except Refused as error:
            if error.code != ErrorCode.TOO_LARGE:
                raise
            await self._smaller(batch, error)
            return
        for entry, result in zip(batch, reply.results, strict=True):
            await self._settle(entry, result)

    async def _smaller(self, batch: list[_Entry], error: Refused) -> None:
        """Too much for one request: in two halves; a single sample that is too large becomes an error."""
        if len(batch) > 1:
            half = len(batch) // 2
            await self._send(batch[:half])
            await self._send(batch[half:])
            return
        (entry,) = batch
        cause = f"SampleTooLarge: {len(entry.frame)} bytes: {error.detail}; raise controller.max_request_bytes"
        sample = failed(entry.lease, entry.index, cause)
        frame = encode_sample(sample)
        if len(frame) >= len(entry.frame):
            raise error
        await self._send([_Entry(entry.lease, entry.index, frame)])

    async def _settle(self, entry: _Entry, result: PushResult) -> None:
        lease_id = entry.lease.lease_id
        if result.accepted:
            self._leases.done(lease_id, entry.index)
        elif result.code in _UNKNOWN and not entry.declared and self._leases.get(lease_id) is not None:
            # The controller's store may have lost the lease: the sample is pushed again if it is taken back.
            if lost := await self._session.declare([lease_id]):
                log.info("the lease of group %s is lost: %s", entry.lease.group_id, result.detail)
                self.on_lost(lost)
            else:
                self._queue.append(replace(entry, declared=True))
        elif result.code == ErrorCode.LEASE_LOST:
            log.info("the lease of group %s is lost: %s", entry.lease.group_id, result.detail)
            self.on_lost([lease_id])
        elif self._leases.get(lease_id) is not None:
            log.error(
                "sample %d of group %s is refused (%s: %s); its lease is given back",
                entry.index,
                entry.lease.group_id,
                result.code,
                result.detail,
            )
            self.on_lost([lease_id])
            await self._session.call(lambda _: api.release(lease_id))


def cut_batch(sizes: Sequence[int], max_bytes: int, max_items: int) -> int:
    """How many of the queued frames go into one request: at least one, no more than the limits allow."""
    total = 0
    for count, size in enumerate(sizes[:max_items]):
        total += size
        if total > max_bytes and count:
            return count
    return min(len(sizes), max_items)


def failed(
    group: LeasedGroup, index: int, error: str, ending: Ending = "engine_error", kept: str | None = None
) -> Sample:
    """A sample that could not be generated: its prompt, and why."""
    return to_sample(group, index, NOTHING, "abort", error=error, ending=ending, kept=kept)


def to_sample(
    group: LeasedGroup,
    index: int,
    generated: Generation,
    reason: FinishReason,
    *,
    error: str | None,
    text: str | None = None,
    kept: str | None = None,
    **judged: Any,
) -> Sample:
    """A sample as it travels: the prompt, what was generated, and its rewards or the error that took their place.

    judged: `rewards`, `score`, `outage`, `ending`, `seconds` and `answer` of its header.
    """
    prompt = np.asarray(group.prompt_token_ids, np.int32)
    n, r, source = len(prompt), len(generated.token_ids), group.row.get("data_source")
    header = SampleHeader(
        index=index,
        prompt_tokens=n,
        response_tokens=r,
        total_tokens=n + r,
        oldest_version=min(generated.version_values.tolist(), default=-1),
        newest_version=max(generated.version_values.tolist(), default=-1),
        finish_reason=reason,
        baseline=index == group.greedy,
        source=one_line(str("" if source is None else source))[:LONGEST_SOURCE],
        error=None if error is None else error[:MAX_ERROR],
        **judged,
    )
    return Sample(
        header=header,
        token_ids=np.concatenate([prompt, generated.token_ids]),
        loss_mask=np.concatenate([np.zeros(n, np.uint8), np.ones(r, np.uint8)]),
        logprobs=np.concatenate([np.zeros(n, np.float32), np.minimum(generated.logprobs, 0.0)]),
        version_starts=np.concatenate([np.zeros(1, np.int32), generated.version_starts + np.int32(n)]),
        version_values=np.concatenate([np.full(1, -1, np.int32), generated.version_values]),
        kept_counts=generated.kept_counts,
        kept_ids=generated.kept_ids,
        held_ids=generated.held_ids,
        expert_shape=np.array(generated.expert_ids.shape[1:] if generated.expert_ids.size else [], np.int32),
        expert_ids=generated.expert_ids.ravel(),
        expert_weights=generated.expert_weights.ravel(),
        text=text,
        kept=kept,
    )
