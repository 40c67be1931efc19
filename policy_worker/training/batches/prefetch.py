"""The next batch, fetched and decoded while a step trains: a guess, which costs no step anything where it is wrong.

    begin(t + 1) ─▶ thread: table as of now ─▶ rows of this rank ─▶ payloads ─▶ samples ─▶ take(table of t + 1)

Which groups step t + 1 trains is decided after t is committed. A sample of the guess whose line of the table is equal
in the batch is taken; the others are fetched as ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal

from policy_worker.model.micro_batch import TrainSample
from schema.wire.batch import StepTable

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that a batch waits for what was asked for ahead; then it is fetched as ever."""
TRIES = 3
"""Times that the guess may change between its table and its payloads."""

Line = tuple[str, int, int, int, int, int, float | None, bool]
Frames = Sequence[bytes | memoryview]
Rows = Sequence[int] | Literal["none"]
Ask = Callable[[int, Rows], tuple[StepTable, Frames] | None]
"""(step, rows) → table of the guess, payloads of the rows; None: that step's batch is being decided, or an end."""


def line_of(table: StepTable, row: int) -> Line:
    """Return what a table says of one sample: its group, and what its payload has to agree with."""
    return (
        table.group_ids[table.group[row]], table.index[row], table.total_tokens[row], table.response_tokens[row],
        table.oldest_version[row], table.newest_version[row], table.score[row], table.is_baseline(row),
    )  # fmt: skip


class Prefetcher:
    """One guess at a time. ask: of the controller, waiting for a guess. decode: (table, row, payload) → sample.

    rows_of: the rows that this rank computes of a table. All three are called in a thread of its own."""

    def __init__(
        self,
        ask: Ask,
        decode: Callable[[StepTable, int, bytes | memoryview], TrainSample],
        rows_of: Callable[[StepTable], Sequence[int]],
    ) -> None:
        self._ask, self._decode, self._rows_of = ask, decode, rows_of
        self._thread: threading.Thread | None = None
        self._guessed = threading.Event()
        """Whether a guess is there, and its payloads are on their way."""
        self._found: dict[Line, TrainSample] = {}

    def begin(self, step: int) -> None:
        """Look for the batch of `step`, unless the thread for the one before has not ended yet."""
        if self._thread is None or not self._thread.is_alive():
            self._guessed.clear()
            self._found = {}
            self._thread = threading.Thread(target=self._run, args=(step,), name="prefetch", daemon=True)
            self._thread.start()

    def _run(self, step: int) -> None:
        try:
            guess: StepTable | None = None
            rows: Sequence[int] | None = None
            for _ in range(TRIES):
                answer = self._ask(step, "none" if rows is None else rows)
                if answer is None:
                    return
                self._guessed.set()
                (table, frames), before = answer, guess
                if rows is not None and table == before:
                    payloads = zip(rows, frames, strict=True)
                    self._found = {line_of(table, row): self._decode(table, row, frame) for row, frame in payloads}
                    return
                guess, rows = table, self._rows_of(table)
        except Exception as error:  # the batch is asked for again when it is due, and errors are named there
            log.info("nothing of step %d is fetched ahead: %s", step, error)

    def guessed(self, timeout: float = 0.0) -> bool:
        """Whether there is, or will be soon, something to take; waits so many seconds for that."""
        return self._guessed.wait(timeout)

    def take(self, table: StepTable) -> dict[int, TrainSample]:
        """By row, the samples of a batch that are there. Waits for what is on its way, not for ever."""
        if self._thread is not None and self.guessed():
            self._thread.join(PATIENCE)
        fetched, self._found = self._found, {}
        lines = ((row, line_of(table, row)) for row in range(table.n_samples) if fetched)
        return {row: fetched[line] for row, line in lines if line in fetched}
