"""Batches on disk (`schema.wire.batch_file`): kept while a run trains, read again by a replay.

    controller ─▶ source ─ keep ─▶ BatchRecorder ─▶ <run>/batches/step-… ─▶ RecordedBatches ─▶ grpo

A batch is written before it is trained on, so the one on which training fails is there. What fails in writing is a
trouble for people to see, and never ends training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from policy_worker.errors import BadBatchError
from policy_worker.model.micro_batch import TrainSample
from policy_worker.training.batches.prefetch import Frames
from policy_worker.training.batches.source import check_table, train_sample
from schema.wire import batch_file
from schema.wire.batch import StepTable
from schema.wire.batch_file import Facts
from schema.wire.frame import FrameError
from schema.wire.payload_file import resolve

log = logging.getLogger(__name__)

KEY = "profiler.record_batches"


class BatchRecorder:
    """Keeps the batches of the newest steps; on rank 0 only.

    n: how many. payloads: the directory through which large samples come."""

    def __init__(self, folder: Path, n: int, facts: Facts, payloads: Path | None = None) -> None:
        self._folder, self._n, self._facts, self._payloads = folder, n, facts, payloads
        self._trouble = ""

    def trouble(self) -> str:
        """Describe what went wrong with the newest batch; "": nothing."""
        return self._trouble

    def keep(self, table: StepTable, frames: Frames) -> None:
        """Write the batch that is about to be trained on; samples that lie in files of their own are copied."""
        before = self._trouble
        try:
            whole = [resolve(self._payloads, frame) for frame in frames]
            batch_file.write(self._folder, table, whole, self._facts, keep=self._n)
            self._trouble = ""
        except (OSError, FrameError) as error:
            reason = getattr(error, "strerror", None) or error
            self._trouble = (
                f"{KEY}: the batch of step {table.step} could not be written to {self._folder}: {reason}; "
                f"training goes on without it"
            )
        if self._trouble and not before:
            log.warning("%s", self._trouble)
        elif before and not self._trouble:
            log.info("batches are recorded again, from step %d on", table.step)


class RecordedBatches:
    """`Batches` out of files, for one rank of a replay. Nothing is ever waited for."""

    prefetched_fraction: float | None = None

    def __init__(self, folder: Path, bound: int) -> None:
        self.bound = bound
        self._folder = folder
        self._frames: Frames = ()
        self._job: str | None = None

    def poll(self, step: int, wait_s: float = 0.0) -> StepTable:
        """The table of a step.

        Raises `BadBatchError`: its file is gone or damaged, is of another step or job, or breaks the staleness bound.
        """
        del wait_s
        path = batch_file.path_of(self._folder, step)
        try:
            table, self._frames, facts = batch_file.read(path)
        except OSError as error:
            reason = error.strerror or error
            raise BadBatchError(f"the batch of step {step}, {path}, cannot be read: {reason}") from error
        except FrameError as error:
            raise BadBatchError(str(error)) from error
        self._job = self._job or facts.job_id
        if facts.job_id != self._job:
            raise BadBatchError(f"{path} is of job {facts.job_id}, the batches before it are of {self._job}")
        if len(self._frames) != table.n_samples:
            raise BadBatchError(f"{path} has {len(self._frames)} samples, its table {table.n_samples}")
        check_table(table, step, self.bound)
        return table

    def payloads(self, table: StepTable, rows: Sequence[int]) -> dict[int, TrainSample]:
        """The samples of these rows. Raises `BadBatchError`, see `source.train_sample`."""
        return {row: train_sample(table, row, self._frames[row], self.bound) for row in rows}
