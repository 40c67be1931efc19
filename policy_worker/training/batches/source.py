"""Batches of reinforcement learning: waited for by rank 0, known to all ranks as a table, fetched by rows
by one rank of each unit.

A table is checked against the staleness bound, a payload against its line of the table, and the versions of its
tokens against the bound, before anything is trained on. The controller has seen to all of it; this is the safety
net, so a contradiction is an error and no filter.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from controller.client import Call
from controller.client import calls as api
from policy_worker.errors import BadBatchError
from policy_worker.model.micro_batch import TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.training.batches.prefetch import Frames, Prefetcher, line_of
from schema.wire.batch import StepTable, decode_batch
from schema.wire.frame import FrameError
from schema.wire.payload_file import resolve
from schema.wire.sample import decode_sample

log = logging.getLogger(__name__)

FETCH = 2.0
"""Seconds that one question for payloads of a batch may wait."""
PREFETCH_WAIT = 60.0
"""The same for what the next batch would be, which is asked for again until that is decided."""


class DataEnded(Exception):
    """No step follows: the data has ended."""


class Batches(Protocol):
    """The batches that steps are trained on, and where they come from. All ranks call alike.

    bound: S, the most steps by which a sample may be older than the step that trains it."""

    bound: int
    prefetched_fraction: float | None
    """Part of the samples fetched last, on all ranks, that was there before; None: all are."""

    def poll(self, step: int, wait_s: float) -> StepTable | None:
        """The table of a step, or None when it is not ready yet after `wait_s` seconds. A collective."""

    def payloads(self, table: StepTable, rows: Sequence[int]) -> dict[int, TrainSample] | None:
        """The samples of these rows of the table just polled; None if they are gone. A collective."""


class BatchSource:
    """Asks the controller for batches (`Batches`).

    bound: S, the most steps by which a sample may be older than the step that trains it.
    payloads: the directory through which large samples come (see `schema.wire.payload_file`)."""

    def __init__(
        self,
        group: RankGroup,
        call: Callable[[Call[bytes | None]], bytes | None],
        policy_epoch: int,
        bound: int,
        payloads: Path | None = None,
    ) -> None:
        self._group, self._call, self._policy_epoch, self.bound = group, call, policy_epoch, bound
        self._payloads = payloads
        self.seen: Callable[[StepTable], None] = lambda _: None
        """Called with every table before it is trained on."""
        self.keep: Callable[[StepTable, Frames], None] | None = None
        """Called with every table and all its payloads before they are trained on. This rank asks for all then."""
        self._frames: Frames | None = None
        self.prefetcher: Prefetcher | None = None
        self.prefetched_fraction: float | None = None

    def prefetch(
        self, call: Callable[[Call[bytes | None]], bytes | None], rows_of: Callable[[StepTable], Sequence[int]]
    ) -> None:
        """From now on fetch the next batch while a step trains, where a rank is a unit of its own.

        call: for another thread. rows_of: the rows that this rank computes of a table."""
        if self._group.data_ranks < self._group.world or self.keep is not None:
            return

        def ask(step: int, rows: Sequence[int] | Literal["none"]) -> tuple[StepTable, Frames] | None:
            while True:
                began = time.monotonic()
                if data := call(api.step_batch(step, self._policy_epoch, rows, wait_s=PREFETCH_WAIT, prefetch=True)):
                    table, frames = _decode(data)
                    check_table(table, step, self.bound)
                    return table, frames
                if time.monotonic() - began < PREFETCH_WAIT / 2:  # answered before the wait was over
                    return None

        self.prefetcher = Prefetcher(ask, self._decoded, rows_of)

    def poll(self, step: int, wait_s: float) -> StepTable | None:
        """The table of a step, or None when it is not ready yet after `wait_s` seconds. A collective.

        Raises `BadBatchError`: the table breaks the staleness bound, or is of another step."""
        if self._group.world == 1:  # alone, so all payloads are ours: they come along
            here = self.prefetcher is not None and self.prefetcher.guessed()
            data = self._ask(step, "none" if here else "all", wait_s)
            if data is None:
                return None
            table, frames = _decode(data)
            self._frames = None if here else frames
        else:
            text = self._group.lead(lambda: self._table_text(step, wait_s))
            if text is None:
                return None
            table = StepTable.model_validate_json(text)
        check_table(table, step, self.bound)
        self.seen(table)
        if self._group.leads and table.n_samples:
            log.info("%s", describe(table))
        return table

    def _table_text(self, step: int, wait_s: float) -> str | None:
        data = self._ask(step, "none", wait_s)
        return None if data is None else _decode(data)[0].model_dump_json()

    def _ask(self, step: int, rows: Sequence[int] | Literal["all", "none"], wait_s: float = FETCH) -> bytes | None:
        return self._call(api.step_batch(step, self._policy_epoch, rows, wait_s=wait_s))

    def payloads(self, table: StepTable, rows: Sequence[int]) -> dict[int, TrainSample] | None:
        """The samples of these rows of the table just polled; a collective.

        None, on all ranks, if the batch is not there any more for one of them: the store lost payloads of it, and
        their groups are made again. Then it has to be polled for once more.

        Raises `BadBatchError`: a payload cannot be decoded, contradicts the table, or has tokens beyond the bound."""
        prefetched = self.prefetcher.take(table) if self.prefetcher is not None else {}
        missing = [row for row in rows if row not in prefetched]
        frames = self._group.share(self._fetch(table, missing) if self._group.leads_unit else None)
        counts = [float(frames is None), len(rows) - len(missing), len(rows)]
        gone, n_prefetched, n_rows = self._group.all_reduce(counts, "sum")
        if gone or frames is None:
            log.warning("the batch of step %d is not there any more: waiting for it again", table.step)
            return None
        if len(frames) != len(missing):
            raise BadBatchError(f"asked for {len(missing)} samples of step {table.step}, got {len(frames)}")
        self.prefetched_fraction = n_prefetched / n_rows if n_rows else None
        if self.prefetcher is not None:
            self.prefetcher.begin(table.step + 1)
        fetched = dict(zip(missing, frames, strict=True))
        return {
            row: prefetched[row] if row in prefetched else self._decoded(table, row, fetched[row]) for row in rows
        }

    def _decoded(self, table: StepTable, row: int, frame: bytes | memoryview) -> TrainSample:
        return train_sample(table, row, self._whole(table, row, frame), self.bound)

    def _fetch(self, table: StepTable, rows: Sequence[int]) -> Frames | None:
        """The frames of these rows, None if the batch is another one by now, or none."""
        if self._group.world == 1 and self._frames is not None:
            return self._kept(table, self._frames, rows)
        if self.keep is None and not rows:
            return []
        data = self._ask(table.step, rows if self.keep is None else "all")
        if not data:
            return None
        assembled, frames = _decode(data)
        if assembled != table:
            return None
        return frames if self.keep is None else self._kept(table, frames, rows)

    def _kept(self, table: StepTable, frames: Frames, rows: Sequence[int]) -> Frames:
        """These rows out of all frames, which are kept."""
        if len(frames) != table.n_samples:
            raise BadBatchError(f"step {table.step} has {table.n_samples} samples, and {len(frames)} came")
        if self.keep is not None:
            self.keep(table, frames)
        return [frames[row] for row in rows]

    def _whole(self, table: StepTable, row: int, frame: bytes | memoryview) -> bytes | memoryview:
        try:
            return resolve(self._payloads, frame)
        except FrameError as error:
            raise BadBatchError(f"sample {row} of step {table.step}: {error}") from error


def _decode(data: bytes) -> tuple[StepTable, Frames]:
    try:
        return decode_batch(data)
    except FrameError as error:
        raise BadBatchError(f"a batch cannot be read: {error}") from error


def check_table(table: StepTable, step: int, bound: int) -> None:
    """Raises `BadBatchError` unless the table is of this step and no sample is older than the bound allows."""
    if table.step != step:
        raise BadBatchError(f"asked for the batch of step {step}, got that of step {table.step}")
    for row, (oldest, newest) in enumerate(zip(table.oldest_version, table.newest_version, strict=True)):
        if not _has_answer(table, row):
            continue
        if newest > step or oldest > newest:
            raise BadBatchError(f"sample {row} of step {step} claims weight versions {oldest} to {newest}")
        if step - oldest > bound:
            raise BadBatchError(
                f"sample {row} of step {step} is {step - oldest} steps old (version {oldest}), the bound is {bound}: "
                f"refused, since training on it would break the promise of allowed_outdated_steps"
            )


def check_versions(step: int, row: int, sample: TrainSample, bound: int) -> None:
    """Raises `BadBatchError` if a token of a sample is older than the bound allows, or newer than the step."""
    for version, tokens in sample.tokens_by_version.items():
        if not 0 <= step - version <= bound:
            raise BadBatchError(
                f"sample {row} of step {step} has {tokens} tokens of version {version}, allowed are versions "
                f"{max(step - bound, 0)} to {step}: refused, since training on them would break the promise "
                f"of allowed_outdated_steps"
            )


_NUMBERED = re.compile(r"(.*-p)([0-9]+)(-s[0-9]+)?")


def describe(table: StepTable) -> str:
    """Which groups a step trains, and how old they are: a line of the log, so that a run can be audited.

    `step 7 of timeline 1 trains 16 samples of versions 5 to 7: e0-p28..30 e0-p33`"""
    rows = [row for row in range(table.n_samples) if counts(table, row)]
    versions = [table.oldest_version[row] for row in rows] + [table.newest_version[row] for row in rows]
    spans: list[tuple[str, str, int, int]] = []
    for name in table.group_ids:
        match = _NUMBERED.fullmatch(name)
        prefix, number, suffix = (match[1], int(match[2]), match[3] or "") if match else (name, 0, "")
        if spans and spans[-1][:2] == (prefix, suffix) and spans[-1][3] + 1 == number:
            spans[-1] = (prefix, suffix, spans[-1][2], number)
        else:
            spans.append((prefix, suffix, number, number))
    groups = " ".join(
        f"{prefix}{first}" + (f"..{last}" if last > first else "") + suffix for prefix, suffix, first, last in spans
    )
    return (
        f"step {table.step} of timeline {table.timeline} trains {len(rows)} samples of versions "
        f"{min(versions, default=-1)} to {max(versions, default=-1)}: {groups}"
    )


def counts(table: StepTable, row: int) -> bool:
    """Whether a sample takes part in the loss: it has a score, generated tokens, and is not a baseline."""
    return _has_answer(table, row) and not table.is_baseline(row)


def _has_answer(table: StepTable, row: int) -> bool:
    """Whether its rewards did not fail, and the policy generated some of it."""
    return table.score[row] is not None and table.response_tokens[row] > 0


def train_sample(table: StepTable, row: int, frame: bytes | memoryview, bound: int) -> TrainSample:
    """A sample out of its payload, checked against its line of the table and the bound. Raises `BadBatchError`."""
    with span("decode"):
        sample = decode_payload(table, row, frame)
    check_versions(table.step, row, sample, bound)
    return sample


def decode_payload(table: StepTable, row: int, frame: bytes | memoryview) -> TrainSample:
    """One sample, proven equal to its line of the table. Raises `BadBatchError`."""
    try:
        sample = decode_sample(frame)
    except FrameError as error:
        raise BadBatchError(f"sample {row} of step {table.step} cannot be decoded: {error}") from error
    header = sample.header
    in_payload = (
        header.index, header.total_tokens, header.response_tokens, header.oldest_version, header.newest_version,
        header.score, header.baseline,
    )  # fmt: skip
    claimed = line_of(table, row)[1:]
    if in_payload != claimed:
        raise BadBatchError(
            f"sample {row} of step {table.step} is not what the table says: index, tokens, response tokens, "
            f"versions, score, baseline are {in_payload}, not {claimed}"
        )
    return TrainSample.of_wire(sample)
